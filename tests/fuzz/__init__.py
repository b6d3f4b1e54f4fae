"""Coverage-guided fuzzing of all that reads what comes from outside.

target.py    what a target is, and what it must hold to; mutate.py  changes that keep the shape of JSON
loaders.py   files of models; tokenizers.py  vocabularies; answers.py  what models say and clients ask for;
             frames.py  what processes and stores read; transfer.py  what other engines send, compared with a plain
             model of the receiver (transfer_model.py)
__main__.py  `make fuzz`: every target in turn, with those of csrc/fuzz; run.py, one.py  one target under atheris
corpus/      inputs that reach different code, a folder for each target; test_corpus.py reads them all
"""
