"""Cores of small models on the graph executor."""

from __future__ import annotations

from pathlib import Path

from kvasir.engine.core import EngineCore
from tests.engine.cores import core_of
from tests.runner.made import files_of


def folder_of(folder: Path, family: str, **change) -> str:
    """A family of tests.models.families with two layers and random weights."""
    files_of(folder, family, **{"num_hidden_layers": 2, **change})
    return str(folder)


def graph_core(folder: str, **options) -> EngineCore:
    defaults = {"executor": "graph", "device": "cpu", "threads": 1, "block_size": 16, "num_blocks": 40}
    core = core_of(folder, **{**defaults, "max_num_seqs": 4, "max_num_batched_tokens": 64, **options})
    assert core.info.executor == "graph"
    return core
