"""Parsing a model's output: reasoning, content and tool calls, from a stream of text.

format.py   the description of a format; table.py, rows_json.py, rows_marked.py the known formats
detect.py   finds the format that a model's chat template is written for
parser.py   Parser: text in, events out; events.py the events, and a whole message built from them
objects.py, headed.py, python_calls.py, channels.py   the notations of calls; emitter.py their shared state
tape.py     the text that is not consumed yet; json_text.py, python_text.py, marked_text.py (over nested.py), values.py
            the notations of arguments
"""
