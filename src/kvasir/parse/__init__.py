"""What a model says, taken apart: reasoning, content and tool calls, from a stream of text.

format.py   what describes a format; table.py, rows_json.py, rows_marked.py the formats there are
detect.py   which of them a model's chat template is written for
parser.py   Parser: text in, events out; events.py the events, and a whole message made of them
objects.py, headed.py, python_calls.py, channels.py   the ways to write a call; telling.py what they share
tape.py     the text not yet consumed; json_text.py, python_text.py, marked_text.py (over nested.py), values.py what
            arguments are written in
"""
