"""EAGLE-3 heads in every layout, against a head in plain torch, over a prompt and several drafted positions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from torch import Tensor

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.eagle3 import tap_names
from kvasir.models.eagle3_config import Eagle3Config
from kvasir.ops import native
from kvasir.ops.heads import join_heads
from kvasir.program.trace import trace
from kvasir.runner.load import LoadedModel, LoadOptions, load_model
from kvasir.runner.load_head import LoadedHead, load_head
from kvasir.runner.packing import Packer
from kvasir.weights.find import find_model
from tests.layers.parts import batch_of
from tests.models import eagle3_heads as plain
from tests.models.driver import make_cache, piece
from tests.models.eagle3_heads import LAYOUTS, Tensors, config_of, settings, tensors_of, write
from tests.models.family_parts import SIZES
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, dummy, dummy_source, random_ids
from tests.program.made import Driver, bits, program_of

LENGTH, DRAFTED = 37, 4
TARGET = {**SIZES, "model_type": "llama", "num_hidden_layers": 6}
IDS = {"speculators": [2, 3, 5], "speculators-qwen3": [2, 3, 5, 6], "gguf": [2, 4, 6]}  # of layers, before them
TAPS = {
    "speculators": (1, 2, 4), "speculators-qwen3": (1, 2, 4, 5), "gguf": (1, 3, 5), "nvidia": (1, 3, 4),
}  # fmt: skip


def fast(every: Iterable[str], *few: str) -> list[Any]:
    """All of them, for a parameter; those that are not named are slow."""
    return [pytest.param(one, marks=[] if one in few else pytest.mark.slow) for one in every]


@cache
def target() -> Any:
    return dummy(TARGET, seed=3)


def opened(folder: Path, layout: str, config: dict[str, Any], tensors: Tensors) -> LoadedHead:
    return load_head(find_model(write(folder, layout, config, tensors)), target())


def ids_of(layout: str) -> list[int]:
    return IDS.get(layout, [1, 3, 4])


def target_rows(s: dict[str, Any]) -> Tensor:
    return torch.randn((LENGTH, s["taps"] * s["target"]), generator=torch.Generator().manual_seed(5)) * 2


Steps = tuple[
    Tensor, Tensor, Tensor
]  # rows for logits, logits and carried rows, of the prompt and of drafted positions


@torch.inference_mode()
def expected(s: dict[str, Any], tensors: Tensors) -> tuple[Steps, list[int]]:
    """The oracle's, and the target's ids after each position: the last of them are drafted."""
    ids = random_ids(LENGTH, s["vocab"], seed=4)
    table = tensors["embed_tokens.weight"] if s["embed"] else target().embed.weight
    lm_head = tensors["lm_head.weight"] if s["head"] else target().head.weight.squeeze(0)
    to_target = tensors["d2t"] + torch.arange(s["draft"]) if "d2t" in tensors else torch.arange(s["draft"])
    rows = plain.fused(s, tensors, target_rows(s))
    for i in range(DRAFTED + 1):
        found = plain.head(s, tensors, rows, table[ids], lm_head)
        if i < DRAFTED:
            ids.append(int(to_target[found[1][-1].argmax()]))
            rows = torch.cat([rows, found[2][-1:]])
    return found, ids


@torch.inference_mode()
def drafted(head: Any, s: dict[str, Any], ids: Sequence[int], chunks: tuple[int, ...] = ()) -> Steps:
    """The engine's: the prompt's positions in chunks, then each drafted position from the carried row before it."""
    cache = make_cache(head, fill=float("nan"))
    blocks, taps, found, start = np.arange(1, 9, dtype=np.int32), target_rows(s), [], 0
    for size in (*chunks, LENGTH - sum(chunks), *(1,) * (len(ids) - LENGTH)):
        part = list(ids[start : start + size])
        batch = batch_of([piece(cache, part, start, blocks)], cache)
        rows = torch.zeros((len(batch.tokens_T), head.width))
        if start < LENGTH:
            padded = torch.zeros((len(rows), taps.shape[1]))
            padded[: len(part)] = taps[start : start + size]
            rows = head.join(padded)
        else:
            rows[0] = found[-1][2][-1]
        normed, carried = head.forward(batch.tokens_T, rows, batch)
        out = normed[: len(part)]
        found.append((out, head.logits(out), carried[: len(part)]))
        start += len(part)
    return tuple(torch.cat(parts) for parts in zip(*found, strict=True))  # type: ignore[return-value]


@pytest.mark.parametrize("layout", fast(LAYOUTS, "specforge", "eagle-3.1", "speculators-qwen3", "gguf"))
def test_a_head_of_each_layout_drafts_as_plain_torch(tmp_path, layout):
    s = settings(layout)
    tensors = tensors_of(s)
    loaded = opened(tmp_path, layout, config_of(layout, s, ids_of(layout)), tensors)
    head = loaded.model
    assert head.taps == tuple(f"layers.{i}" for i in TAPS.get(layout, (1, 3, 4)))
    (rows, logits, carried), ids = expected(s, tensors)
    assert 1 < logits.abs().max() < 100, "the weights' scale hides errors"
    whole = drafted(head, s, ids)
    for ours, theirs in zip(whole, (rows, logits, carried), strict=True):
        assert distance(ours, theirs) < TOLERANCE
    for ours, again in zip(whole, drafted(head, s, ids, chunks=(1, 17, 2)), strict=True):
        assert torch.equal(ours, again)
    if "d2t" in tensors:
        assert head.target_ids is not None and head.target_ids.dtype == np.int32
        assert head.target_ids.tolist() == (tensors["d2t"] + torch.arange(s["draft"])).tolist()
    else:
        assert head.target_ids is None
    assert loaded.num_parameters == sum(t.numel() for name, t in tensors.items() if name not in ("d2t", "t2d"))


def test_a_gguf_file_may_share_the_targets_tables(tmp_path):
    """Its vocabulary is then stated, and both tables are the target's; factors of the rotary embedding are a tensor."""
    s = settings("gguf", embed=False, head=False, draft=96, width=64, joint_norm=False)
    tensors, config = tensors_of(s), config_of("gguf", s, [2, 3, 5])
    factors = torch.tensor([1.0, 1.0, 1.0, 1.5, 2.0, 3.0, 4.0, 8.0])
    head = opened(tmp_path, "gguf", config, {**tensors, "rope_freqs.weight": factors}).model
    s["factor"] = factors
    (rows, logits, carried), ids = expected(s, tensors)
    for ours, theirs in zip(drafted(head, s, ids), (rows, logits, carried), strict=True):
        assert distance(ours, theirs) < TOLERANCE
    assert not {"embed", "lm_head"} & {path for path, _ in head.walk()}, "the target's tables are not the head's"


# A change of the config that leaves the tensors' shapes -> what of (rows, logits, carried) it moves.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "rms_norm_eps": ({"rms_norm_eps": 0.5}, "rows logits carried"),
    "rope_theta": ({"rope_theta": 3.0}, "rows logits carried"),
    "rope_scaling": ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rows logits carried"),
    "heads": ({"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}, "rows logits carried"),
    "hidden_act": ({"hidden_act": "gelu"}, "rows logits carried"),
    "window": (
        {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention"]},
        "rows logits carried",
    ),
    "norm_before_residual": ({"norm_before_residual": True}, "rows logits carried"),
    "norm_output": ({"norm_output": True}, "carried"),
    "logit_scale": ({"logit_scale": 0.25}, "logits"),
}


@pytest.mark.parametrize("field", fast(CHANGES, "rope_theta", "norm_before_residual", "norm_output", "logit_scale"))
def test_each_field_counts(tmp_path, field):
    s, (changes, moved) = settings("specforge"), CHANGES[field]
    tensors, config = tensors_of(s), config_of("specforge", s, [1, 3, 4])
    ids = random_ids(LENGTH, s["vocab"], seed=4)  # without drafted ids, which other logits would change
    before = drafted(opened(tmp_path / "before", "specforge", config, tensors).model, s, ids)
    after = drafted(opened(tmp_path / "after", "specforge", config | changes, tensors).model, s, ids)
    for name, ours, theirs in zip(("rows", "logits", "carried"), before, after, strict=True):
        if name in moved.split():
            assert distance(ours, theirs) > SENSITIVITY
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("flag", ["joint_norm", "chunk_norms", "bias", "head_norm"])
def test_a_setting_without_its_tensors_is_an_error_that_names_one(tmp_path, flag):
    s = settings("specforge")
    config, tensors = config_of("specforge", s | {flag: True}, [1, 3, 4]), tensors_of(s)
    names = {"joint_norm": "input_norm", "chunk_norms": "fc_norm.0", "bias": "q_proj.bias", "head_norm": "q_norm"}
    with pytest.raises(ModelFileError, match=names[flag]):
        opened(tmp_path / "without", "specforge", config, tensors)
    with pytest.raises(ModelFileError, match=names[flag]):  # tensors that the config does not ask for
        opened(tmp_path / "with", "specforge", config_of("specforge", s, [1, 3, 4]), tensors_of(s | {flag: True}))


def of_ids(ids: list[int] | None, before: bool, layers: int = 36) -> list[int]:
    config = config_of("specforge", settings("specforge"), ids)
    read = Eagle3Config.from_hf(config | ({"model_type": "eagle3"} if before else {}))
    return [int(name.removeprefix("layers.")) for name in tap_names(read, layers)]


def test_layers_are_numbered_as_their_makers_do():
    """36 layers: the default rows are those after layers 1, 17 and 32 in every numbering."""
    assert of_ids(None, before=False) == of_ids(None, before=True) == [1, 17, 32]
    assert of_ids([1, 17, 32], before=False) == of_ids([1, 17, 32], before=True) == [1, 17, 32]
    assert of_ids([2, 18, 33], before=False) == of_ids([2, 18, 33], before=True) == [1, 17, 32]
    assert of_ids([3, 9, 20], before=False) == [3, 9, 20]
    assert of_ids([3, 9, 20], before=True) == [2, 8, 19]
    assert of_ids([3, 9, 36], before=False) == of_ids([3, 9, 36], before=True) == [2, 8, 35]
    assert of_ids([0, 9, 20], before=False) == [0, 9, 20]
    assert of_ids([32, 1, 17], before=False) == [32, 1, 17], "the order is that of the joined rows"
    with pytest.raises(UnsupportedModel, match="before layer 0"):
        of_ids([0, 9, 20], before=True)
    for ids in ([3, 9, 37], [40, 2, 3]):
        with pytest.raises(ModelFileError, match=r"layers \[.*which has 36"):
            of_ids(ids, before=False)
    with pytest.raises(ModelFileError, match="name three"):
        of_ids(None, before=False, layers=4)


class OverItself:
    """A head over rows made of the embedded ids, as a model: what programs compute."""

    def __init__(self, head: Any, base: Any):
        self.one, self.base, self.taps = head, base, len(head.taps)
        self.cache_spec, self.walk, self.logits = head.cache_spec, head.walk, head.logits

    def forward(self, tokens_T: Any, batch: Any) -> Any:
        embedded_T1D = self.base.embed(tokens_T).view(-1, 1, 64)
        joined = embedded_T1D
        for _ in range(self.taps - 1):
            joined = join_heads(joined, embedded_T1D)
        rows, carried = self.one.forward(tokens_T, self.one.join(joined.flatten(1)), batch)
        batch.keep("carried", carried)
        return rows


def base_folder(folder: Path) -> Path:
    """The checkpoint of `target`."""
    source, config = dummy_source(target(), seed=3), {**TARGET, "architectures": ["LlamaForCausalLM"]}
    save_file({name: source.array(name) for name in source.names()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def base_program(folder: Path) -> LoadedModel:
    """`target` as a program."""
    return load_model(find_model(base_folder(folder)), "float32", options=LoadOptions("program"))


@pytest.mark.skipif(not native.available(), reason=native.reason())
@pytest.mark.parametrize(
    "layout", fast(("eagle-3.1", "nvidia", "speculators-qwen3", "shared-head"), "eagle-3.1", "shared-head")
)
def test_programs_give_the_same_bits_on_any_threads_and_in_any_chunks(tmp_path, layout):
    s, base = settings(layout), base_program(tmp_path)
    tensors = tensors_of(s)
    files = find_model(write(tmp_path / "head", layout, config_of(layout, s, ids_of(layout)), tensors))
    over = OverItself(load_head(files, base.model, "float32", packer=Packer).model, base.model)
    loaded = LoadedModel(over, {}, "Eagle3", "float32", 0, 0, trace=trace(over, ["carried"]))
    ids, found = random_ids(70, s["vocab"], seed=4), []
    for threads, chunks in ((1, (70,)), (2, (70,)), (2, (1, 33, 36)), (1, (64, 6))):
        program = program_of(loaded, threads=threads, fill=float("nan"))
        driver, start, parts = Driver(program, ids), 0, []
        for count in chunks:
            hidden = driver.hidden(start, count)
            carried, ends = program.export("carried", count).copy(), (*range(32, count, 32), count)
            logits = [program.logits_of(range(first, end)).copy() for first, end in pairwise((0, *ends))]
            parts.append(np.concatenate([hidden, carried, np.concatenate(logits)], 1))
            start += count
        found.append(np.concatenate(parts))
        program.close()
    assert all(np.array_equal(bits(found[0]), bits(other)) for other in found[1:])
    table = target().embed.weight
    rows = plain.fused(s, tensors, table[ids].repeat(1, s["taps"]))
    lm_head = tensors["lm_head.weight"] if s["head"] else target().head.weight.squeeze(0)
    out, logits, carried = plain.head(
        s, tensors, rows, (tensors["embed_tokens.weight"] if s["embed"] else table)[ids], lm_head
    )
    assert distance(torch.from_numpy(found[0]), torch.cat([out, carried, logits], 1)) < TOLERANCE
