"""Ids that a model's generation_config.json suppresses are never sampled, as in transformers' `generate`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvasir.types import Request, SamplingParams
from tests.engine.cores import core_of, random_model
from tests.oracle import plain

torch = pytest.importorskip("torch")
PROMPT = tuple(range(3, 20))


def answered(folder: str, count: int) -> list[int]:
    core = core_of(folder, dtype="float32", threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    (answer,) = plain(core, [Request("r", PROMPT, params)]).values()
    core.runner.close()
    return answer.tokens


@pytest.mark.filterwarnings("ignore")
def test_suppressed_ids_are_those_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = random_model("llama", tmp_path)
    first = answered(folder, 8)
    suppressed = [*dict.fromkeys(first[:4]), 999]  # one beyond the vocabulary
    (Path(folder) / "generation_config.json").write_text(json.dumps({"suppress_tokens": suppressed}))
    found = answered(folder, 8)
    assert not set(found) & set(suppressed) and found != first
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8, eos_token_id=-1, pad_token_id=0,
        suppress_tokens=suppressed[:-1],
    )  # fmt: skip
    assert found == expected[0, len(PROMPT) :].tolist()
