"""A job on a Ray dataset, for tests to kill: `python -m tests.data.ray_job ROWS CHECKPOINT OUTPUT ACTORS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import kvasir.data
from kvasir import SamplingParams

OPTIONS = {"threads": 1, "num_blocks": 60, "max_model_len": 256, "max_num_seqs": 4}
PARAMS = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)


def main(rows: str, checkpoint: str, output: str, actors: int) -> None:
    import ray
    import ray.data

    ray.init(num_cpus=actors + 1, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20)
    dataset = ray.data.from_items(json.loads(Path(rows).read_text()), override_num_blocks=8)
    found = kvasir.data.map(
        dataset, model="kvasir-mini", sampling_params=PARAMS, params_column="params", checkpoint=checkpoint,
        concurrency=actors, batch_size=8, num_cpus=1, **OPTIONS,
    )  # fmt: skip
    Path(output).write_text(json.dumps(sorted(found.take_all(), key=lambda row: row["i"]), default=list))
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
