"""Whatever a GGUF file's metadata and shapes are, the reader of its architecture gives a config or a KvasirError that
says what is wrong."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvasir.errors import KvasirError, ModelFileError
from kvasir.models import gguf_config
from kvasir.models.config import Fields
from kvasir.models.dflash import DFlash
from kvasir.models.eagle3 import Eagle3
from kvasir.models.gemma4_assistant import Gemma4Assistant
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.models.gguf_names import FAMILIES
from kvasir.models.registry import model_class_for
from tests.models.test_gguf_metadata import HIDDEN, ROWS, Tensors

ABSENT: Any = object()
# Values of a metadata key, as the parser of files gives them.
HOSTILE = (
    *(ABSENT, True, False, "", "x", 0, -1, 1, 2**31, 2**63, -(2**40), 0.0, -1.5, 1e-40, 1e308, np.nan, np.inf, -np.inf),
    *(np.zeros(0, np.int32), np.array([0, 2], np.int32), np.array([2, 0], np.uint32), np.arange(3, dtype=np.int64)),
    *(
        np.array([-1, 2**40]),
        np.array([1e38, np.nan], np.float32),
        np.array([True, False]),
        np.array([np.inf, -np.inf]),
    ),
    *(["a", "b"], [], [["a"], ["b"]], [np.arange(2), np.arange(3)], [np.arange(2), np.arange(2)]),
)
STRIDE = 17  # the fast tier takes every 17th pair of a key and a value, of each architecture others
SIZES: dict[str, Any] = {
    "context_length": 64,
    "embedding_length": HIDDEN,
    "block_count": 2,
    "feed_forward_length": 80,
    "attention.head_count": 4,
}
# What readers ask for by name.
MORE: dict[str, Any] = {
    **dict.fromkeys(("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"), 1e-5),
    **{
        "attention.head_count_kv": 4,
        "attention.key_length": 12,
        "attention.value_length": 8,
        "rope.dimension_count": 4,
    },
    **{"attention.key_length_mla": 12, "attention.value_length_mla": 8, "attention.kv_lora_rank": 16},
    **{"attention.indexer.head_count": 2, "attention.indexer.key_length": 8, "attention.indexer.top_k": 4},
    **{"attention.sliding_window": 16, "shortconv.l_cache": 3, "kda.head_dim": 8, "logit_scale": 1.0},
    **{"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 16, "interleave_moe_layer_step": 1},
    **{"expert_shared_count": 1, "expert_shared_feed_forward_length": 16, "moe_every_n_layers": 2},
    **{"ssm.conv_kernel": 4, "ssm.time_step_rank": 4, "ssm.state_size": 16, "ssm.inner_size": 64, "ssm.group_count": 1},
    **{
        "wkv.head_size": 16,
        **{f"attention.{name}_lora_rank": 4 for name in ("decay", "iclr", "value_residual_mix", "gate")},
    },
    **{"xielu.alpha_p": 0.8, "xielu.alpha_n": 0.8, "xielu.beta": 0.5, "xielu.eps": -1e-6},
}
# What is needed beyond what an error names.
OWN: dict[str, dict[str, Any]] = {
    **{name: {"expert_count": 4, "expert_weights_scale": 1.0} for name in ("deepseek2", "mistral4")},
    **{name: {"attention.q_lora_rank": 16, "expert_gating_func": 2} for name in ("deepseek32", "glm-dsa")},
    "dflash": {"target_layers": [2, 3], "mask_token_id": 3},
    "gemma3n": {"embedding_length_per_layer_input": 16},
    "gemma4-assistant": {"embedding_length_out": 64},
    "hunyuan-moe": {"expert_feed_forward_length": 80},
    "kimi-linear": {"attention.key_length": 20},
    "mimo2": {"attention.head_count_kv": 4},
    "step35": {"attention.head_count": 4, "attention.sliding_window_pattern": [False, True]},
    "nomic-bert-moe": {"moe_every_n_layers": 2},
}
TENSORS = {
    name: np.zeros(shape, np.float32)
    for name, shape in {
        "token_embd.weight": (ROWS, HIDDEN),
        "output.weight": (ROWS, HIDDEN),
        "per_layer_token_embd.weight": (ROWS, 32),
        "token_types.weight": (2, HIDDEN),
        "blk.0.attn_qkv.weight": (96, HIDDEN),
        "blk.0.ffn_gate.weight": (80, HIDDEN),
        "blk.0.ffn_gate_shexp.weight": (16, HIDDEN),
        "blk.0.laurel_l.weight": (4, HIDDEN),
        "blk.0.indexer.attn_q_b.weight": (16, 16),
        "blk.1.indexer.attn_q_b.weight": (16, 16),
        "blk.1.ffn_gate_inp.weight": (4, HIDDEN),
    }.items()
}


def read(architecture: str, values: dict[str, Any], tensors: dict[str, np.ndarray] = TENSORS) -> None:
    """Reads a file with these keys, without the architecture before their names, as loading does."""
    metadata = {key if key.startswith("xielu.") else f"{architecture}.{key}": value for key, value in values.items()}
    source: Any = Tensors(tensors)
    config = hf_config_from_gguf({"general.architecture": architecture, **metadata}, source)
    kinds: dict[str, Any] = {"dflash": DFlash, "eagle3": Eagle3, "gemma4-assistant": Gemma4Assistant}
    kind = kinds.get(architecture) or model_class_for(config)
    kind.Config.from_hf(config)


@functools.cache
def completed(architecture: str) -> tuple[tuple[str, Any], ...]:
    """Keys with which a file of this architecture is accepted: sizes, and what the errors ask for."""
    values = {**SIZES, **OWN.get(architecture, {})}
    for _ in MORE:
        try:
            read(architecture, values)
        except ModelFileError as error:
            named = re.search(r"([\w.]+) is missing|: ([\w.]+) is ", str(error))
            key = next((name for name in (named.groups() if named else ()) if name in MORE), "")
            assert key and key not in values, f"{architecture}: {error}"
            values[key] = MORE[key]
        else:
            return tuple(values.items())
    raise AssertionError(f"{architecture}: no end of missing keys")


@functools.cache
def keys_of(architecture: str) -> tuple[str, ...]:
    """The keys that the reader of this architecture looks at."""
    seen: list[Fields] = []
    values = dict(completed(architecture))
    whole = gguf_config.architecture_fields
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_config, "architecture_fields", lambda *given: seen.append(whole(*given)) or seen[-1])
        read(architecture, values)
    return tuple(sorted(seen[0].read))


def changes(architecture: str) -> Iterator[tuple[str, Any]]:
    for key in keys_of(architecture):
        yield from ((key, value) for value in HOSTILE)


def check(architecture: str, key: str, value: Any) -> None:
    values = {**dict(completed(architecture)), key: value}
    try:
        read(architecture, {name: given for name, given in values.items() if given is not ABSENT})
    except KvasirError as error:
        assert 0 < len(str(error)) < 600
    except Exception as error:
        error.add_note(f"{architecture}.{key} = {value!r:.200}")
        raise


def test_the_errors_lead_to_a_file_that_is_accepted():
    assert all(len(keys_of(architecture)) > 5 for architecture in FAMILIES)


def test_no_value_of_a_key_breaks_a_reader():
    for place, architecture in enumerate(FAMILIES):
        for key, value in list(changes(architecture))[place % STRIDE :: STRIDE]:
            check(architecture, key, value)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
def test_no_value_of_any_key_breaks_a_reader(architecture):
    for key, value in changes(architecture):
        check(architecture, key, value)


SHAPES = (None, (0, 0), (), (0,), (7,), (1, 1), (ROWS, 0), (3, 5, 7), (4, 1, 1, 1))


@pytest.mark.parametrize("shape", [*SHAPES[:2], *(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[2:])])
def test_no_shape_of_a_tensor_breaks_a_reader(shape):
    for name in TENSORS:
        others = {other: array for other, array in TENSORS.items() if other != name}
        tensors = others if shape is None else {**others, name: np.zeros(shape, np.float32)}
        for architecture in FAMILIES:
            try:
                read(architecture, dict(completed(architecture)), tensors)
            except KvasirError as error:
                assert str(error)
            except Exception as error:
                error.add_note(f"{architecture}: {name} of shape {shape}")
                raise
