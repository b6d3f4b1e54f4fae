"""map: all rows of a Ray dataset, or of an iterable, through a model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvasir.data.mapper import Mapper
from kvasir.errors import ConfigError
from kvasir.types import SamplingParams

BATCH = 256  # rows that an actor gets at a time


def map(
    dataset: Any,
    *,
    model: str,
    column: str = "prompt",
    sampling_params: SamplingParams | None = None,
    params_column: str | None = None,
    chat: bool = False,
    lora_column: str | None = None,
    checkpoint: str | Path | None = None,
    concurrency: int = 1,
    batch_size: int = BATCH,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    ray_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """The rows with the columns of `RowAnswer`: a Ray dataset for one, an iterator in order for any other iterable of
    mappings. Finished rows are in the folder `checkpoint`, which all nodes must share; the same call continues a job
    after any death.

    column ... checkpoint, options: see Mapper. concurrency: engines. For a Ray dataset each is in an actor with
    `num_cpus` and `num_gpus`, and they divide the memory that engines take by default. batch_size: rows that an actor
    gets at a time. ray_options: further arguments of `map_batches`. Raises KvasirError.
    """
    if concurrency < 1 or batch_size < 1:
        raise ConfigError(f"concurrency is {concurrency} and batch_size {batch_size}", "expected 1 or more")
    job = {
        "model": model,
        "column": column,
        "sampling_params": sampling_params,
        "params_column": params_column,
        "chat": chat,
        "lora_column": lora_column,
        "checkpoint": None if checkpoint is None else str(checkpoint),
    }
    if not hasattr(dataset, "map_batches"):
        if num_cpus or num_gpus or ray_options:
            raise ConfigError(
                "num_cpus, num_gpus and ray_options are for Ray datasets", "give one, as ray.data.read_json makes it"
            )
        return _answers(dataset, {**job, **options, "replicas": concurrency})
    options.setdefault("host_share", 1 / concurrency)
    if num_cpus and num_cpus >= 1:
        options.setdefault("threads", int(num_cpus))
    # There is a dataset, so Ray is there.
    from ray.data import ActorPoolStrategy  # type: ignore[import-not-found]

    return dataset.map_batches(
        Mapper,
        fn_constructor_kwargs={**job, **options},
        compute=ActorPoolStrategy(size=concurrency),
        batch_size=batch_size,
        num_cpus=num_cpus,
        num_gpus=num_gpus,
        **(ray_options or {}),
    )


def _answers(rows: Iterable[Mapping[str, Any]], job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with Mapper(**job) as mapper:
        yield from mapper.answers(rows)
