"""vLLM's own classes of KV cache events, where its sources are: installed, or below KVASIR_TEST_VLLM."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock, patch

import pytest

VARIABLE = "KVASIR_TEST_VLLM"  # a folder that contains the package vllm
FILE = "vllm/distributed/kv_events.py"
_NEEDS = ("config.kv_events", "logger", "utils.network_utils", "v1.core.kv_cache_utils")  # its imports


def vllm_events() -> ModuleType:
    """The module. Of sources that are not installed it is run alone: what it imports plays no part in the format."""
    if folder := os.environ.get(VARIABLE):
        path = Path(folder) / FILE
        if not path.is_file():
            pytest.fail(f"{VARIABLE} is {folder}, and there is no {FILE}")
        spec = importlib.util.spec_from_file_location("vllm_kv_events", path)
        assert spec and spec.loader
        found = importlib.util.module_from_spec(spec)
        others = {f"vllm.{name}": MagicMock() for name in _NEEDS}
        others["vllm.v1.core.kv_cache_utils"] = SimpleNamespace(ExternalBlockHash=bytes | int)  # type: ignore
        with patch.dict(sys.modules, {"vllm": MagicMock(), spec.name: found, **others}):
            spec.loader.exec_module(found)
        sys.modules[spec.name] = found  # msgspec looks up the types of its fields here
        return found
    return pytest.importorskip(
        "vllm.distributed.kv_events", reason=f"vLLM is not installed, and {VARIABLE} does not name its sources"
    )
