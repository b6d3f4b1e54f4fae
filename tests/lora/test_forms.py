"""The same adapter in the forms of peft, llama.cpp and mlx-lm, and in the spellings that peft has."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.errors import KvasirError, ModelFileError, UnsupportedModel
from kvasir.lora import Adapter, read_adapter
from tests.examples import examples
from tests.lora.made import bound, write_gguf, write_mlx, write_peft
from tests.weights._files import small_gguf

H, INNER, V, R, E, EXPERT = 64, 48, 96, 4, 4, 32
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": H, "intermediate_size": INNER,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": V,
    "max_position_embeddings": 128, "tie_word_embeddings": False, "attention_bias": True,
}  # fmt: skip
TIED = {**LLAMA, "tie_word_embeddings": True}
MOE = {
    **{key: value for key, value in LLAMA.items() if key != "attention_bias"}, "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": E, "num_experts_per_tok": 2,
    "moe_intermediate_size": EXPERT, "num_hidden_layers": 1,
}  # fmt: skip
Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.0.mlp.down_proj"
EXPERTS = "model.layers.0.mlp.experts"
rng = np.random.default_rng(7)


def randn(*shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def pair(outputs: int, inputs: int, rank: int = R) -> tuple[np.ndarray, np.ndarray]:
    return randn(rank, inputs), randn(outputs, rank)


def named(**pairs: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        f"{name}.lora_{kind}.weight": array for name, ab in pairs.items() for kind, array in zip("AB", ab, strict=True)
    }


def same(one: Adapter, other: Adapter) -> None:
    assert one.matrices.keys() == other.matrices.keys() and one.tables.keys() == other.tables.keys()
    for ours, theirs in ((one.matrices, other.matrices), (one.tables, other.tables)):
        for name, change in ours.items():
            assert np.array_equal(change.delta(), theirs[name].delta())


@pytest.fixture
def llama(tmp_path) -> tuple[dict, Adapter]:
    pairs = {Q: pair(H, H), DOWN: pair(H, INNER)}
    path = write_peft(tmp_path / "peft", named(**pairs), target_modules=["q_proj", "down_proj"])
    return pairs, bound(path, LLAMA)


def test_mlx_is_transposed(tmp_path, llama):
    pairs, adapter = llama
    tensors = {f"{name}.lora_a": a.T for name, (a, _) in pairs.items()}
    tensors |= {f"{name}.lora_b": b.T for name, (_, b) in pairs.items()}
    same(bound(write_mlx(tmp_path / "mlx", tensors), LLAMA), adapter)


def pairs_from_halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as llama.cpp's converter orders them."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def test_gguf_has_the_rows_of_llama_in_pairs(tmp_path, llama):
    pairs, adapter = llama
    (qa, qb), (da, db) = pairs[Q], pairs[DOWN]
    tensors = {"blk.1.attn_q.weight.lora_a": qa, "blk.1.attn_q.weight.lora_b": pairs_from_halves(qb, 4)}
    tensors |= {"blk.0.ffn_down.weight.lora_a": da, "blk.0.ffn_down.weight.lora_b": db}
    path = write_gguf(tmp_path / "a.gguf", tensors, 8.0, "llama", adapter__alora__invocation_tokens=[5, 6])
    found = bound(path, LLAMA)
    same(found, adapter)
    assert found.invocation == (5, 6)
    with pytest.raises(UnsupportedModel, match="architecture is 'llama', the model's type 'qwen3_moe'"):
        bound(path, MOE)


def stacks() -> tuple[np.ndarray, ...]:
    """a and b of up and of down for each expert."""
    return randn(E, R, H), randn(E, EXPERT, R), randn(E, R, EXPERT), randn(E, H, R)


def test_experts_in_every_form(tmp_path):
    ua, ub, da, db = stacks()
    single = {}
    for e in range(E):
        single |= {f"{EXPERTS}.{e}.up_proj": (ua[e], ub[e]), f"{EXPERTS}.{e}.down_proj": (da[e], db[e])}
    peft = bound(write_peft(tmp_path / "one", named(**single), target_modules=["up_proj", "down_proj"]), MOE)
    assert len(peft.matrices) == 2 * E and peft.matrices["layers.0.mlp.experts.3.gate_up.up"].rank == R
    names = {"blk.0.ffn_up_exps.weight": (ua, ub), "blk.0.ffn_down_exps.weight": (da, db)}
    gguf = {f"{name}.lora_{k}": t for name, ab in names.items() for k, t in zip("ab", ab, strict=True)}
    same(bound(write_gguf(tmp_path / "a.gguf", gguf, 8.0, "qwen3moe"), MOE), peft)
    names = {"up_proj": (ua, ub), "down_proj": (da, db)}
    mlx = {
        f"model.layers.0.mlp.switch_mlp.{name}.lora_{k}": t
        for name, ab in names.items()
        for k, t in zip("ab", ab, strict=True)
    }
    same(bound(write_mlx(tmp_path / "mlx", mlx), MOE), peft)


def flat(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """As peft has the matrices of all experts: [E * r, in] and [out, r * E]."""
    return a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1)


@pytest.mark.parametrize("order", [["gate_up_proj", "down_proj"], ["down_proj", "gate_up_proj"]])
@pytest.mark.parametrize("exchanged", [False, True])
def test_nested_parameters_are_in_the_order_of_the_class(tmp_path, order, exchanged):
    inner = 20  # so that 2 * inner is not the width
    ua, ub, da, db = randn(E, R, H), randn(E, 2 * inner, R), randn(E, R, inner), randn(E, H, R)
    up, down = (ua, ub), (da, db)
    given = [tuple(t.swapaxes(1, 2) for t in pair[::-1]) if exchanged else pair for pair in (up, down)]
    tensors = named(**{f"{EXPERTS}.base_layer": flat(*given[0]), EXPERTS: flat(*given[1])})
    path = write_peft(tmp_path, tensors, target_modules=[], target_parameters=[f"mlp.experts.{name}" for name in order])
    found = bound(path, {**MOE, "moe_intermediate_size": inner}).matrices
    for e in range(E):
        for name, delta in (
            ("gate_up.gate", ub[e, :inner] @ ua[e]),
            ("gate_up.up", ub[e, inner:] @ ua[e]),
            ("down", db[e] @ da[e]),
        ):
            assert np.allclose(found[f"layers.0.mlp.experts.{e}.{name}"].delta(), 2 * delta, atol=1e-5)


def test_gate_and_up_in_turns(tmp_path):
    config = {**MOE, "model_type": "gpt_oss", "num_local_experts": E, "intermediate_size": EXPERT, "sliding_window": 16}
    config = {key: value for key, value in config.items() if key not in ("architectures", "moe_intermediate_size")}
    a, b = randn(E, R, H), randn(E, 2 * EXPERT, R)
    tensors = named(**{EXPERTS: flat(a, b)})
    path = write_peft(tmp_path, tensors, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    found = bound(path, config).matrices
    for e in range(E):
        for half, part in enumerate(("gate", "up")):
            delta = found[f"layers.0.mlp.experts.{e}.gate_up.{part}"].delta()
            assert np.allclose(delta, 2 * b[e, half::2] @ a[e], atol=1e-5)


def test_square_parameters_of_unknown_versions_are_refused(tmp_path):
    ua, _, _, _ = stacks()
    tensors = named(**{EXPERTS: flat(ua, randn(E, 2 * EXPERT, R))})
    options = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]}
    with pytest.raises(UnsupportedModel, match="cannot be told apart"):
        bound(write_peft(tmp_path, tensors, **options), MOE)
    assert len(bound(write_peft(tmp_path, tensors, peft_version="0.21.0", **options), MOE).matrices) == 2 * E


def test_an_embedding_and_a_tied_head(tmp_path):
    a, b = randn(R, V), randn(H, R)
    table = "model.embed_tokens"
    tensors = {f"{table}.lora_embedding_A": a, f"{table}.lora_embedding_B": b}
    for ties in (False, True):
        path = write_peft(tmp_path / str(ties), tensors, target_modules=["embed_tokens"], ensure_weight_tying=ties)
        found = bound(path, TIED)
        assert np.allclose(found.tables["embed"].delta(), 2 * b @ a) and ("head" in found.matrices) is ties
        if ties:
            assert np.allclose(found.matrices["head"].delta(), (2 * b @ a).T)
        assert not bound(path, LLAMA).matrices
    mlx = bound(write_mlx(tmp_path / "mlx", {f"{table}.lora_a": a.T, f"{table}.lora_b": b.T}), TIED)
    same(mlx, found)
    gguf = {"token_embd.weight.lora_a": a.T, "token_embd.weight.lora_b": b}
    plain = bound(write_gguf(tmp_path / "a.gguf", gguf, 8.0, "llama"), TIED)
    assert np.array_equal(plain.tables["embed"].delta(), mlx.tables["embed"].delta()) and not plain.matrices


def test_whole_tensors(tmp_path):
    tensors = {"model.norm.weight": randn(H), "lm_head.weight": randn(V, H), f"{Q}.bias": randn(H)}
    tensors |= named(**{Q: pair(H, H)})
    found = bound(write_peft(tmp_path, tensors, modules_to_save=["norm", "lm_head"], bias="lora_only"), LLAMA).saved
    assert found.keys() == {"norm.weight", "head.weight", "layers.1.attn.qkv.q.bias"}
    assert np.array_equal(found["norm.weight"], tensors["model.norm.weight"])


def test_dora_and_biases(tmp_path):
    a, b = pair(H, H)
    tensors = named(**{Q: (a, b)}) | {f"{Q}.lora_magnitude_vector": randn(H), f"{Q}.lora_B.bias": randn(H)}
    change = bound(write_peft(tmp_path, tensors, use_dora=True, lora_bias=True), LLAMA).matrices["layers.1.attn.qkv.q"]
    weight = randn(H, H)
    whole = change.merged(weight)
    assert np.allclose(np.linalg.norm(whole, axis=1), np.abs(tensors[f"{Q}.lora_magnitude_vector"]), rtol=1e-5)
    assert change.bias is not None and np.array_equal(change.bias, tensors[f"{Q}.lora_B.bias"])


def test_a_fused_matrix_gives_its_rows_to_its_parts(tmp_path):
    config = {"model_type": "gpt2", "n_embd": H, "n_head": 4, "n_layer": 1, "n_positions": 64, "vocab_size": V}
    a, b = pair(3 * H, H)
    tensors = named(**{"transformer.h.0.attn.c_attn": (a, b)})
    found = bound(write_peft(tmp_path, tensors, target_modules=["c_attn"], fan_in_fan_out=True), config).matrices
    assert found.keys() == {f"layers.0.attn.qkv.{part}" for part in "qkv"}
    for i, part in enumerate("qkv"):
        assert np.allclose(found[f"layers.0.attn.qkv.{part}"].delta(), 2 * b[i * H : (i + 1) * H] @ a, atol=1e-5)
    with pytest.raises(ModelFileError, match="192 outputs"):
        bound(
            write_peft(tmp_path, named(**{"transformer.h.0.attn.c_attn": pair(2 * H, H)}), target_modules=["c_attn"]),
            config,
        )


KEYS = st.sampled_from(["q_proj", "layers.1", r".*\.v_proj", "v_pro.", "x"])


@given(st.dictionaries(KEYS, st.integers(1, 9), max_size=3), st.booleans(), st.sampled_from([None, 0, 1, [0, 1]]))
@examples(60)
def test_ranks_alphas_and_layers(tmp_path_factory, ranks, rslora, layers):
    module, outputs = "model.layers.1.self_attn.v_proj", 32
    rank = next((r for key, r in ranks.items() if re.match(rf"(.*\.)?({key})$", module)), R)
    tensors = named(**{module: pair(outputs, H, rank)})
    path = write_peft(
        tmp_path_factory.mktemp("a"), tensors, target_modules=["v_proj"], rank_pattern=ranks,
        alpha_pattern={"v_proj": 3}, use_rslora=rslora, layers_to_transform=layers,
    )  # fmt: skip
    if layers == 0:
        with pytest.raises(ModelFileError, match="does not select"):
            read_adapter(path)
        return
    change = bound(path, LLAMA).matrices["layers.1.attn.qkv.v"]
    assert change.rank == rank and change.scale == pytest.approx(3 / (rank**0.5 if rslora else rank))


def damaged(**changes):
    return {"tensors": named(**{Q: pair(H, H)}), **changes}


REFUSED = [
    (damaged(new_kind={"x": 1}), "'new_kind' is"),
    (damaged(use_qalora=True), "'use_qalora' is True"),
    (damaged(init_lora_weights="pissa"), "init_lora_weights is 'pissa', which changes"),
    (damaged(peft_type="IA3"), "peft_type is 'IA3'"),
    (damaged(r=8), r"expected \[8, inputs\]"),
    (damaged(r=0), "r is 0"),
    (damaged(r=True), "r is True"),
    (damaged(lora_alpha=float("nan")), "lora_alpha is nan"),
    (damaged(lora_alpha=1e8), "expected a number of at most"),
    (damaged(use_dora=True), "use_dora is true, but"),
    (damaged(rank_pattern={"(": 4}), "rank_pattern cannot be used: missing"),
    (damaged(target_modules=r"(?<=a)q_proj"), "target_modules cannot be used"),
    (damaged(target_modules=["k_proj"]), "does not select"),
    (damaged(exclude_modules=["q_proj"]), "does not select"),
    (damaged(layers_to_transform=[0]), "does not select"),
    (damaged(layers_to_transform=[1], layers_pattern="h"), "does not select"),
    (damaged(target_modules="q" * 5000), "5000 characters"),
    (damaged(trainable_token_indices=[1, 1]), "each id once"),
    (damaged(trainable_token_indices=[1]), "ids without rows"),
    (damaged(tensors={}), "no tensor of an adapter"),
    (damaged(tensors={f"{Q}.lora_A.weight": randn(R, H)}), "no matrix B"),
    (damaged(tensors={f"{Q}.lora_C.weight": randn(R, H)}), "unknown tensor"),
    (damaged(tensors={"model.norm.weight": randn(H)}), "does not name"),
    (damaged(tensors=named(**{Q: (randn(R, H), np.full((H, R), np.nan, np.float32))})), "not finite"),
    (damaged(tensors=named(**{Q: (randn(R, H).astype(np.int8), randn(H, R))})), "stored as I8"),
    (damaged(tensors=named(**{Q: pair(H, H + 1)})), "64 outputs and 64 inputs"),
    (damaged(tensors=named(**{Q: pair(H + 1, H)})), "64 outputs and 64 inputs"),
    (damaged(tensors=named(**{Q.replace("1", "7"): pair(H, H)})), "which Llama does not have"),
    (damaged(tensors=named(**{"model.norm": pair(H, H)}), target_modules=["norm"]), "another form"),
    (damaged(tensors={"lm_head.weight": randn(V + 1, H)}, modules_to_save=["lm_head"]), "another size"),
]


@pytest.mark.parametrize(("given", "why"), REFUSED, ids=[why[:30] for _, why in REFUSED])
def test_what_is_refused(tmp_path, given, why):
    with pytest.raises(KvasirError, match=why):
        bound(write_peft(tmp_path, **given), LLAMA)


def test_pickles_are_never_opened(tmp_path):
    path = write_peft(tmp_path, damaged()["tensors"])
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(UnsupportedModel, match=r"adapter_model\.bin is pickled"):
        read_adapter(path)


def test_patterns_that_hang_re_are_bounded(tmp_path):
    tensors = named(**{f"model.layers.{i}.self_attn.q_proj": pair(H, H) for i in range(2)})
    path = write_peft(tmp_path, tensors, rank_pattern={r"((\w|\.)*)*x": 9})
    assert len(bound(path, LLAMA).matrices) == 2


def test_mlx_and_gguf_refuse_what_does_not_fit(tmp_path: Path):
    a, b = pair(H, H)
    mlx = {f"{Q}.lora_a": a.T, f"{Q}.lora_b": b.T}
    for number, (config, why) in enumerate((
        ({"lora_parameters": {"rank": 4, "alpha": 8, "scale": 2.0}}, "alpha"),
        ({"lora_parameters": {"rank": 4, "scale": "2"}}, "scale is '2'"),
        ({"fine_tune_type": "dora"}, r"no tensor .*\.m'"),
        ({"fine_tune_type": "other"}, "fine_tune_type"),
    )):  # fmt: skip
        with pytest.raises(KvasirError, match=why):
            bound(write_mlx(tmp_path / str(number), mlx, **config), LLAMA)
    with pytest.raises(KvasirError, match=r"unknown tensor blk\.0\.nothing"):
        bound(
            write_gguf(
                tmp_path / "a.gguf", {"blk.0.nothing.weight.lora_a": a, "blk.0.nothing.weight.lora_b": b}, 8, "llama"
            ),
            LLAMA,
        )
    with pytest.raises(ModelFileError, match="no tensor"):
        bound(write_gguf(tmp_path / "b.gguf", {"blk.0.attn_q.weight.lora_a": a}, 8, "llama"), LLAMA)
    with pytest.raises(ModelFileError, match=r"general\.type"):
        read_adapter(a_model(tmp_path))


def a_model(folder: Path) -> Path:
    (folder / "m.gguf").write_bytes(small_gguf())
    return folder / "m.gguf"
