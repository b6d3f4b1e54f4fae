"""Low-rank adapters: reads them from files in the forms of peft, llama.cpp and mlx-lm, and finds what they change in a
model (arXiv:2106.09685).

    read_adapter(path) -> AdapterFile        what the file says, checked without a model
    bind(file, model, config) -> Adapter     the same by our modules, checked against the model

Reading computes nothing: matrices stay views of the mapped files.
"""

from kvasir.lora.adapter import Adapter, AdapterFile, LowRank, TokenRows, Update
from kvasir.lora.bind import bind
from kvasir.lora.read import is_adapter, read_adapter

__all__ = ["Adapter", "AdapterFile", "LowRank", "TokenRows", "Update", "bind", "is_adapter", "read_adapter"]
