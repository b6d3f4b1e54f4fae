"""Encoders that transformers does not have, against plain torch code written from their papers and published layouts:
Nomic's mixture of experts and Jina v2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.models.registry import model_class, model_class_for
from tests.models.hf import load
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance
from tests.models.test_encoders import hidden_of, ids_of

WIDTH, INNER, LAYERS, HEADS, VOCAB, EXPERTS = 48, 80, 4, 4, 97, 4
EPS = 1e-3
NOMIC = {
    "model_type": "nomic_bert", "architectures": ["NomicBertModel"], "activation_function": "gelu",
    "mlp_fc1_bias": True, "mlp_fc2_bias": True, "qkv_proj_bias": True, "moe_every_n_layers": 2, "moe_top_k": 2,
    "num_experts": EXPERTS, "moe_normalize_expert_weights": False, "n_embd": WIDTH, "n_inner": INNER,
    "n_layer": LAYERS, "n_head": HEADS, "n_positions": 130, "vocab_size": VOCAB, "type_vocab_size": 1,
    "layer_norm_epsilon": EPS, "rotary_emb_base": 50, "rotary_emb_fraction": 1.0, "causal": False, "prenorm": False,
    "expert_choice_router": False, "num_shared_experts": 0, "ffn_div": 1, "moe_impl": "megablocks",
    "router_aux_loss_coef": 0.1, "max_trained_positions": 2048, "add_pooling_layer": False, "moe_resid_pdrop": 0.0,
}  # fmt: skip
JINA = {
    "model_type": "bert", "architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi",
    "feed_forward_type": "geglu", "emb_pooler": "mean", "hidden_size": WIDTH, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 6, "max_position_embeddings": 130, "model_max_length": 130,
    "vocab_size": VOCAB, "type_vocab_size": 2, "layer_norm_eps": EPS, "hidden_act": "gelu",
}  # fmt: skip
State = dict[str, torch.Tensor]


def drawn(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> State:
    random = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes.items():
        x = torch.randn(shape, generator=random)
        if len(shape) == 1:
            x = 0.3 * x + (1.0 if name.endswith("weight") else 0.0)
        elif "embeddings" not in name:
            x *= 1.5 * shape[-1] ** -0.5
        state[name] = x
    return state


def norm(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (WIDTH,), state[f"{name}.weight"], state[f"{name}.bias"], EPS)


def linear(state: State, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def heads_of(x: torch.Tensor, heads: int) -> torch.Tensor:
    return x.view(len(x), heads, -1).transpose(0, 1)


# --- Nomic ------------------------------------------------------------------------------------------


def nomic_state(layers: int = LAYERS) -> State:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, WIDTH), "embeddings.token_type_embeddings.weight": (1, WIDTH),
        "emb_ln.weight": (WIDTH,), "emb_ln.bias": (WIDTH,),
    }  # fmt: skip
    for i in range(layers):
        at = f"encoder.layers.{i}."
        shapes |= {f"{at}attn.Wqkv.weight": (3 * WIDTH, WIDTH), f"{at}attn.Wqkv.bias": (3 * WIDTH,)}
        shapes |= {f"{at}attn.out_proj.weight": (WIDTH, WIDTH), f"{at}attn.out_proj.bias": (WIDTH,)}
        shapes |= {f"{at}norm{n}.{part}": (WIDTH,) for n in (1, 2) for part in ("weight", "bias")}
        if i % 2 == 1:
            shapes |= {f"{at}mlp.router.layer.weight": (EXPERTS, WIDTH), f"{at}mlp.experts.bias": (WIDTH,)}
            shapes |= {f"{at}mlp.experts.mlp.{w}": (EXPERTS * INNER, WIDTH) for w in ("w1", "w2")}
        else:
            shapes |= {f"{at}mlp.fc1.weight": (INNER, WIDTH), f"{at}mlp.fc1.bias": (INNER,)}
            shapes |= {f"{at}mlp.fc2.weight": (WIDTH, INNER), f"{at}mlp.fc2.bias": (WIDTH,)}
    return drawn(shapes)


def nomic_rows(state: State, ids: list[int]) -> torch.Tensor:
    x = state["embeddings.word_embeddings.weight"][ids] + state["embeddings.token_type_embeddings.weight"][0]
    x = norm(state, "emb_ln", x)
    dim = WIDTH // HEADS
    angles = torch.arange(len(ids))[:, None] * 50.0 ** (-torch.arange(0, dim, 2) / dim)
    cos, sin = angles.cos(), angles.sin()

    def turned(x_Hnd: torch.Tensor) -> torch.Tensor:
        a, b = x_Hnd.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    for i in range(LAYERS):
        at = f"encoder.layers.{i}."
        q, k, v = (heads_of(part, HEADS) for part in linear(state, f"{at}attn.Wqkv", x).chunk(3, -1))
        mixed = F.softmax(turned(q) @ turned(k).transpose(1, 2) / dim**0.5, -1) @ v
        x = norm(state, f"{at}norm1", x + linear(state, f"{at}attn.out_proj", mixed.transpose(0, 1).flatten(1)))
        if i % 2 == 1:
            scores, chosen = F.linear(x, state[f"{at}mlp.router.layer.weight"]).softmax(-1).topk(2)
            w1, w2 = (state[f"{at}mlp.experts.mlp.{w}"].view(EXPERTS, INNER, WIDTH) for w in ("w1", "w2"))
            rows = [
                sum(s * (F.gelu(w1[e] @ row) @ w2[e]) for s, e in zip(score, experts, strict=True))
                for row, score, experts in zip(x, scores, chosen.tolist(), strict=True)
            ]
            out = torch.stack(rows) + state[f"{at}mlp.experts.bias"]
        else:
            out = linear(state, f"{at}mlp.fc2", F.gelu(linear(state, f"{at}mlp.fc1", x)))
        x = norm(state, f"{at}norm2", x + out)
    return x


# --- Jina -------------------------------------------------------------------------------------------


def jina_state() -> State:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB, WIDTH), "embeddings.token_type_embeddings.weight": (2, WIDTH),
        "embeddings.LayerNorm.weight": (WIDTH,), "embeddings.LayerNorm.bias": (WIDTH,),
    }  # fmt: skip
    for i in range(LAYERS):
        at = f"encoder.layer.{i}."
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            shapes |= {f"{at}attention.{part}.weight": (WIDTH, WIDTH), f"{at}attention.{part}.bias": (WIDTH,)}
        shapes |= {f"{at}attention.output.LayerNorm.{part}": (WIDTH,) for part in ("weight", "bias")}
        shapes |= {f"{at}mlp.gated_layers.weight": (2 * INNER, WIDTH), f"{at}mlp.wo.weight": (WIDTH, INNER)}
        shapes |= {f"{at}mlp.wo.bias": (WIDTH,)}
        shapes |= {f"{at}mlp.layernorm.{part}": (WIDTH,) for part in ("weight", "bias")}
    return drawn(shapes)


# Of six heads: those of four, and the first and third of eight.
SLOPES = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


def jina_rows(state: State, ids: list[int]) -> torch.Tensor:
    x = state["embeddings.word_embeddings.weight"][ids] + state["embeddings.token_type_embeddings.weight"][0]
    x = norm(state, "embeddings.LayerNorm", x)
    places = torch.arange(len(ids))
    bias = -torch.tensor(SLOPES)[:, None, None] * (places[:, None] - places).abs()
    for i in range(LAYERS):
        at = f"encoder.layer.{i}."
        q, k, v = (heads_of(linear(state, f"{at}attention.self.{p}", x), 6) for p in ("query", "key", "value"))
        mixed = F.softmax(q @ k.transpose(1, 2) / (WIDTH / 6) ** 0.5 + bias, -1) @ v
        out = linear(state, f"{at}attention.output.dense", mixed.transpose(0, 1).flatten(1))
        x = norm(state, f"{at}attention.output.LayerNorm", x + out)
        gate, up = linear(state, f"{at}mlp.gated_layers", x).chunk(2, -1)
        x = norm(state, f"{at}mlp.layernorm", x + linear(state, f"{at}mlp.wo", F.gelu(gate) * up))
    return x


# --- both -------------------------------------------------------------------------------------------

MODELS = {"nomic": (NOMIC, nomic_state, nomic_rows), "jina": (JINA, jina_state, jina_rows)}


def saved(config: dict[str, Any], state: State, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_hidden_rows_agree(tmp_path, name):
    config, make, rows = MODELS[name]
    state = make()
    model = load(saved(config, state, tmp_path))
    for count in (1, 2, 33, 100):
        expected = rows(state, ids_of(count))
        assert 1 < expected.abs().max() < 100, "the weights' scale hides errors"
        assert distance(hidden_of(model, [ids_of(count)])[0], expected) < TOLERANCE


@pytest.mark.slow  # a weight that is not used is found by the test above, too
@pytest.mark.parametrize("name", MODELS)
def test_every_weight_moves_the_rows(tmp_path, name):
    config, make, _ = MODELS[name]
    state, ids = make(), ids_of(60)
    before = hidden_of(load(saved(config, state, tmp_path / "before")), [ids])[0]
    for key, tensor in state.items():
        if key.endswith("key.bias") or "token_type" in key:
            continue  # the softmax cancels what all keys share; the second type is that of second texts
        changed = state | {key: tensor.flip(0).contiguous() if len(tensor) > 1 else tensor.flip(1).contiguous()}
        after = hidden_of(load(saved(config, changed, tmp_path / "after")), [ids])[0]
        assert distance(after, before) > 10 * TOLERANCE, key


@pytest.mark.parametrize(
    ("name", "change"),
    [("nomic", {"moe_top_k": 1}), ("nomic", {"rotary_emb_base": 60}), ("nomic", {"layer_norm_epsilon": 0.5}),
     ("jina", {"feed_forward_type": "reglu"}), ("jina", {"layer_norm_eps": 0.5}), ("jina", {"num_attention_heads": 4})],
)  # fmt: skip
def test_every_field_moves_the_rows(tmp_path, name, change):
    config, make, _ = MODELS[name]
    folder, ids = saved(config, make(), tmp_path), ids_of(60)
    assert distance(hidden_of(load(folder, **change), [ids])[0], hidden_of(load(folder), [ids])[0]) > SENSITIVITY


@pytest.mark.parametrize("name", MODELS)
def test_as_a_program(tmp_path, name):
    """Equal to eager, and the same bits alone and together on any instruction set."""
    from kvasir.ops import native

    if not native.available():
        pytest.skip(native.reason())
    from kvasir.runner.load import LoadOptions, load_model
    from kvasir.weights.find import find_model
    from tests.isas import isas
    from tests.program.made import Company, Driver, bits, program_of
    from tests.program.test_encoders import whole_texts

    config, make, _ = MODELS[name]
    folder = saved(config, make(), tmp_path)
    model = load_model(find_model(str(folder)), "float32", options=LoadOptions("program"))
    texts = [ids_of(1), ids_of(40), ids_of(17)]
    alone = [Driver(program_of(model), ids).hidden(0, len(ids), bidirectional=True) for ids in texts]
    expected = hidden_of(load(folder), [texts[1]])[0].numpy()
    assert np.abs(alone[1] - expected).max() < 1e-5 * np.abs(expected).max()
    for isa in isas():
        native.force_isa(isa)
        try:
            together = whole_texts(Company(program_of(model, threads=2, fill=np.nan, blocks=31), texts), *texts)
        finally:
            native.force_isa(None)
        for a, b in zip(alone, together, strict=True):
            assert np.array_equal(bits(a), bits(b))


# --- configs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({**NOMIC, "activation_function": "swiglu"}, UnsupportedModel),
        ({**NOMIC, "activation_function": "relu"}, UnsupportedModel),
        ({**NOMIC, "mlp_fc2_bias": False}, UnsupportedModel),
        ({**NOMIC, "num_shared_experts": 1}, UnsupportedModel),
        ({**NOMIC, "moe_top_k": 5}, ModelFileError),
        ({**NOMIC, "num_experts": 1 << 20}, ModelFileError),
        ({**JINA, "position_embedding_type": "absolute"}, UnsupportedModel),
        ({**JINA, "max_position_embeddings": 1 << 20}, ModelFileError),
        ({**JINA, "feed_forward_type": "glu"}, UnsupportedModel),
        ({**JINA, "model_type": "bert", "architectures": ["BertModel"]}, UnsupportedModel),
    ],
)
def test_configs_that_cannot_be_are_refused(config, error):
    with pytest.raises(error):
        model_class_for(config).Config.from_hf(config)


def test_experts_of_another_number_are_refused(tmp_path):
    state = nomic_state()
    state["encoder.layers.1.mlp.experts.mlp.w1"] = torch.zeros(EXPERTS * INNER + 1, WIDTH)
    with pytest.raises(ModelFileError, match=r"layers\.1\.mlp\.experts\.mlp\.w1"):
        load(saved(NOMIC, state, tmp_path))


def test_the_type_bert_with_an_architecture_of_jina_is_jinas():
    assert model_class_for(JINA) is model_class("jina_bert")
