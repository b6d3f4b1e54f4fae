"""GPT-2: a real one with its author's own activations, then random ones against transformers."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.errors import ModelFileError, UnsupportedModel
from kvasir.layers.tensors import TensorPlace
from kvasir.models.gpt2 import GPT2, GPT2Config
from kvasir.weights.load import fill
from kvasir.weights.source import DummySource
from tests._shared import need
from tests.models.driver import logits_of, make_cache, step, table
from tests.models.hf import load, randomized, save
from tests.models.oracle import SENSITIVITY, TOLERANCE, distance, random_ids

transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

SMALL = {"vocab_size": 97, "n_positions": 96, "n_embd": 48, "n_inner": 80, "n_layer": 3, "n_head": 4}


# --- the sorter -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sorter():
    return load(need("models", "gpt-nano-sort"))


def test_hidden_rows_and_logits_are_the_authors(sorter):
    partials = np.load(need("models", "gpt-nano-sort", "partials.npz"))
    cache = make_cache(sorter, fill=float("nan"))
    for ids, hidden, logits in zip(partials["idx"], partials["ln_f"], partials["lm_head"], strict=True):
        found = step(sorter, cache, [(ids.tolist(), 0, table(1))])[0]
        assert distance(found, torch.from_numpy(hidden)) < TOLERANCE
        assert distance(sorter.logits(found), torch.from_numpy(logits)) < TOLERANCE


@pytest.mark.slow
def test_the_sorting_model_sorts_all_inputs(sorter):
    """All 729 inputs in one batch a step: the six letters of the prompt, then letter after letter."""
    inputs = list(itertools.product(range(3), repeat=6))
    cache = make_cache(sorter, blocks=len(inputs) + 1)
    given = [list(ids) for ids in inputs]
    answers: list[list[int]] = [[] for _ in inputs]
    for start in (0, *range(6, 11)):
        rows = step(sorter, cache, [(ids, start, table(i + 1)) for i, ids in enumerate(given)])
        chosen = sorter.logits(torch.stack([row[-1] for row in rows])).argmax(-1).tolist()
        given = [[token] for token in chosen]
        for answer, token in zip(answers, chosen, strict=True):
            answer.append(token)
    assert all(answer == sorted(ids) for answer, ids in zip(answers, inputs, strict=True))


# --- against transformers ---------------------------------------------------------------------------


def oracle(**changes):
    config = transformers.GPT2Config(**{**SMALL, **changes})
    return randomized(transformers.GPT2LMHeadModel(config))


def expected(model, ids) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"activation_function": "gelu"},
        {"activation_function": "relu"},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"layer_norm_epsilon": 0.1},
        {"n_inner": None},
        {"n_head": 1},
    ],
)
def test_logits_are_those_of_transformers(tmp_path, changes):
    hf = oracle(**changes)
    ids = random_ids(96, 97)
    found = logits_of(load(save(hf, tmp_path)), ids, fill=float("nan"))
    assert 1.0 < expected(hf, ids).abs().max() < 100.0
    assert distance(found, expected(hf, ids)) < TOLERANCE


@pytest.mark.parametrize(
    "flipped",
    [
        {"activation_function": "relu"},
        {"layer_norm_epsilon": 0.1},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"n_head": 2},
    ],
)
def test_each_field_moves_the_logits(tmp_path, flipped):
    save(oracle(), tmp_path)
    ids = random_ids(96, 97)
    assert distance(logits_of(load(tmp_path, **flipped), ids), logits_of(load(tmp_path), ids)) > SENSITIVITY


def test_the_two_gelus_are_distinguished(tmp_path):
    """They differ by 1e-3 at most, too little for the common bound: ours must lie as far apart as theirs."""
    ids = random_ids(96, 97)
    hf = save(oracle(), tmp_path)
    ours = distance(logits_of(load(hf, activation_function="gelu"), ids), logits_of(load(hf), ids))
    exact = oracle(activation_function="gelu")
    theirs = distance(expected(exact, ids), expected(oracle(), ids))
    assert theirs > TOLERANCE and ours == pytest.approx(theirs, rel=0.05)


def test_a_checkpoint_of_the_bare_model_with_old_masks_loads(tmp_path):
    """The published gpt2 has no prefix, a causal mask per layer and no output matrix."""
    hf = oracle()
    ids = random_ids(20, 97)
    bare = tmp_path / "bare"
    save(hf.transformer, bare)
    tensors = load_file(bare / "model.safetensors")
    tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 96, 96).tril() for i in range(3)}
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, bare / "model.safetensors")
    assert "wte.weight" in tensors and "lm_head.weight" not in tensors
    assert distance(logits_of(load(bare, architectures=["GPT2LMHeadModel"]), ids), expected(hf, ids)) < TOLERANCE


# --- equalities of bits -----------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)],
    ids=["float32", "bfloat16"],
)
def random_model(request):
    config = GPT2Config.from_hf({"model_type": "gpt2", **SMALL})
    model = GPT2(config)
    shapes = {"wte": (97, 48), "wpe": (96, 48), "ln_f": (48,)}
    for i in range(3):
        shapes |= {f"h.{i}.{name}": shape for name, shape in {
            "ln_1": (48,), "ln_2": (48,), "attn.c_attn": (48, 144), "attn.c_proj": (48, 48),
            "mlp.c_fc": (48, 80), "mlp.c_proj": (80, 48)}.items()}  # fmt: skip
    biases = {f"{name}.bias": shape[-1:] for name, shape in shapes.items() if name not in ("wte", "wpe")}
    source = DummySource({f"{name}.weight": shape for name, shape in shapes.items()} | biases)
    fill(model, source, TensorPlace(request.param))
    return model


@pytest.mark.slow
def test_whole_chunked_and_one_by_one_give_the_same_bits(exact_machine, random_model):
    ids = random_ids(90, 97)
    at_once = logits_of(random_model, ids)
    for chunks in ((7, 32, 1), (64,), (1,) * 89):
        assert torch.equal(logits_of(random_model, ids, chunks=chunks), at_once)
    assert torch.equal(logits_of(random_model, ids, block_size=64, fill=float("nan")), at_once)


def test_neighbours_change_no_bits(exact_machine, random_model):
    texts = [random_ids(count, 97, seed=count) for count in (1, 40, 17, 64)]
    cache = make_cache(random_model, fill=float("nan"))
    pieces = [(ids, 0, np.arange(1 + 4 * i, 5 + 4 * i, dtype=np.int32)) for i, ids in enumerate(texts)]
    for ids, hidden in zip(texts, step(random_model, cache, pieces), strict=True):
        assert torch.equal(random_model.logits(hidden), logits_of(random_model, ids))


# --- config -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"n_head": 5}, ModelFileError),
        ({"n_positions": 0}, ModelFileError),
        ({"activation_function": "tanh"}, UnsupportedModel),
        ({"add_cross_attention": True}, UnsupportedModel),
        ({"sliding_window": 4}, UnsupportedModel),
    ],
)
def test_configs_that_cannot_be_are_refused(fields, error):
    with pytest.raises(error):
        GPT2Config.from_hf({"model_type": "gpt2", **SMALL, **fields})


def test_absent_fields_are_those_of_the_first_gpt2():
    config = GPT2Config.from_hf({"model_type": "gpt2"})
    assert (config.width, config.inner, config.num_layers, config.heads) == (768, 3072, 12, 12)
    assert (config.vocab_size, config.context_length, config.act, config.tied) == (
        50257,
        1024,
        "gelu_new",
        True,
    )
