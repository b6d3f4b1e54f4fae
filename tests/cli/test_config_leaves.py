"""One expert stands for all of a mixture's: sizes counted so are those of all modules, whole and split."""

from __future__ import annotations

from typing import Any

import pytest

from kvasir.cli import config_facts
from kvasir.models.registry import model_class_for
from kvasir.ops import native
from kvasir.runner.packing import Packer
from tests.engine.cores import CONFIGS

pytestmark = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")


def every_module(model: Any) -> list[tuple[Any, int]]:
    return [(leaf, 1) for _, leaf in model.walk()]


@pytest.mark.parametrize("devices", [1, 2, 8])
@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt-oss", "qwen3-next"])
def test_experts_are_counted_as_if_one_by_one(monkeypatch, name, devices):
    kind: Any = model_class_for(CONFIGS[name])
    packer = Packer("bfloat16", "q8")
    model = kind(kind.Config.from_hf(CONFIGS[name]))
    if devices > 1:
        config_facts._split(model, devices, packer)
    counted = sum(config_facts._sizes(model, packer, "bfloat16"))
    leaves = sum(1 for _ in config_facts._leaves(model))
    monkeypatch.setattr(config_facts, "_leaves", every_module)
    assert counted == sum(config_facts._sizes(model, packer, "bfloat16")) > 0
    assert (leaves < len(every_module(model))) == (name != "llama")
