"""Ranks on the eager executor: the same places to meet, for the family that has no program and for a mixture."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvasir.parallel.local import LocalRanks  # noqa: E402
from kvasir.runner.load import LoadOptions, load_model  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests.engine.cores import CONFIGS, random_model  # noqa: E402
from tests.layers.adapted import set_adapter  # noqa: E402
from tests.models import driver  # noqa: E402
from tests.program.test_adapters import eager_hidden, made  # noqa: E402

IDS = [(7 * i * i + 3 * i + 1) % 300 for i in range(50)]
SMALL = [kind for kind in CONFIGS if CONFIGS[kind]["vocab_size"] < 10000]
FAST = [("qwen3-next", 2), ("mixtral", 2), ("mixtral", 8)]
SLOW = [(kind, size) for kind in SMALL for size in (2, 4, 8) if (kind, size) not in FAST]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


def hidden(model, adapter: int = 0) -> np.ndarray:
    if model.tasks[0] == "embed":
        blocks = np.arange(1, 8, dtype=np.int32)
        return driver.step(model, driver.make_cache(model, blocks=8), [(IDS, 0, blocks)], causal=False)[0].numpy()
    if adapter:
        return eager_hidden(model, [IDS], [adapter])[0]
    return driver.logits_of(model, IDS, chunks=(17, 32)).numpy()


def of_all(models: list, ranks: LocalRanks, adapter: int = 0) -> list[np.ndarray]:
    def one(model) -> np.ndarray:
        try:
            return hidden(model, adapter)
        except BaseException:
            ranks.abort()
            raise

    with ThreadPoolExecutor(len(models)) as threads:
        return list(threads.map(one, models))


@pytest.mark.usefixtures("exact_machine")
@pytest.mark.parametrize(("kind", "size"), CASES)
def test_each_rank_has_the_bits_of_one_alone(tmp_path, kind, size):
    files, ranks = find_model(random_model(kind, Path(tmp_path))), LocalRanks(size)
    whole = load_model(files, "float32").model
    models = [load_model(files, "float32", options=LoadOptions(mesh=mesh)).model for mesh in ranks.meshes]
    for adapter in (0, 1) if kind == "mixtral" else (0,):
        if adapter:
            for model in (whole, *models):
                set_adapter(model, adapter, made(whole, adapter, 4))
        expected = hidden(whole, adapter).view(np.uint32)
        assert all(np.array_equal(found.view(np.uint32), expected) for found in of_all(models, ranks, adapter))
