"""How much memory the weights of a model take, found before any is read."""

from __future__ import annotations

from collections import Counter
from typing import Any

from kvasir import device as devices
from kvasir.errors import ConfigError, UnsupportedModel, quoted
from kvasir.layers.places import SizePlace, no_memory
from kvasir.runner.packing import Packer, stored_kind
from kvasir.weights.load import fill
from kvasir.weights.packed_file import ALIGN
from kvasir.weights.source import WeightSource

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def weight_bytes(
    model: Any,
    source: WeightSource,
    dtype: str,
    packer: Packer | None = None,
    sizes: Counter[int] | None = None,
) -> int:
    """Bytes that the weights will take on this rank, found by a load that reads no weights. Layers get arrays without
    memory, which a later `fill` replaces, for what is not packed. sizes: gets those of the packed matrices of each
    module, by its `id()`, as they lie in a file of packed weights. Raises UnsupportedModel, or ModelFileError as `fill`
    does."""
    total, nowhere = 0, SizePlace(_ITEM_BYTES[dtype])

    def count(leaf: Any, name: str, source: WeightSource, stored: str, take: Any) -> bool:
        nonlocal total
        try:
            size = packer.nbytes(leaf, name, stored_kind(source.info(stored).dtype, take)) if packer else None
        except ValueError as error:
            raise UnsupportedModel(
                f"tensor {quoted(stored)} is stored as {source.info(stored).dtype}, which cannot be packed",
                "use the model's checkpoint in float32, float16 or bfloat16, or a GGUF file of it",
            ) from error
        if size is None:
            size = leaf.put(name, no_memory(leaf.expects()[name]), nowhere).nbytes
        elif sizes is not None:
            size += -size % ALIGN
            sizes[id(leaf)] += size
        total += size
        return True

    fill(model, source, None, hold=count)
    return total


def check_room(needed: int, device: str) -> None:
    """Raises ConfigError if so many bytes are not free on the device."""
    if needed > (free := devices.available(device)):
        raise ConfigError(
            f"the weights take {needed / 2**20:.0f} MiB, and {free / 2**20:.0f} MiB of memory are free",
            "raise the memory limit, quantize the model, or use a smaller one",
        )
