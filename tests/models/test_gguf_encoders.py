"""GGUF files of encoders, written with gguf-py as llama.cpp's converters write them, give the bits of the folders that
they were made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvasir.errors import ModelFileError, TemplateError, UnsupportedModel
from kvasir.models.gguf_config import hf_config_from_gguf
from kvasir.text.chat import ChatTemplate
from kvasir.types import Task
from kvasir.weights.local import gguf_chat_templates
from tests.models import test_published_encoders as apart
from tests.models.driver import make_cache, step
from tests.models.families import config_of
from tests.models.gguf_files import gguf, writing
from tests.models.hf import load, randomized, save
from tests.models.oracle import TOLERANCE, state_of
from tests.models.test_classifiers import LABELS
from tests.models.test_classifiers import oracle as classifier
from tests.models.test_encoders import ENCODERS, hidden_of, ids_of, oracle

# In ENCODERS of test_encoders.py: the settings that a file can express.
ARCHITECTURES = {
    "roberta": "bert",
    "xlm-roberta": "bert",
    "distilbert": "bert",
    "nomic": "nomic-bert",
    "jina-v3": "jina-bert-v3",
    "modernbert": "modern-bert",
    "eurobert": "eurobert",
    "embedding-gemma": "gemma-embedding",
}
SLOW = ("roberta", "xlm-roberta", "eurobert")
CLASSIFIERS = {"xlm-roberta": "bert", "modernbert": "modern-bert"}
# What the files cannot express: XLM-RoBERTa's function in these tests, and the pattern of these layers.
EXPRESSED: dict[str, dict[str, Any]] = {
    "xlm-roberta": {"hidden_act": "gelu"},
    "modernbert": {
        "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"], "classifier_pooling": "mean",
    },
    "embedding-gemma": {"layer_types": ["sliding_attention"] * 4, "query_pre_attn_scalar": 32},
}  # fmt: skip


def write_file(path: Path, architecture: str, keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    with writing(path, architecture) as writer:
        for name, value in keys.items():
            if name == "hidden_act":  # newer than gguf-py
                writer.add_string(f"{architecture}.hidden_act", value)
            else:
                getattr(writer, f"add_{name}")(value)
        for name, data in tensors.items():
            writer.add_tensor(name, np.ascontiguousarray(data))
    return path


def named(architecture: str, layers: int, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Under gguf-py's names, which expects those of the models that the converters strip of their prefixes."""
    number = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(number, layers)
    found = {}
    for name, data in tensors.items():
        bare = name
        for prefix in ("nomic_bert.", "roberta.", "distilbert.", "model."):
            bare = bare.removeprefix(prefix)
        short = names.get_name(bare, (".weight", ".bias")) or names.get_name(f"model.{bare}", (".weight", ".bias"))
        assert short, name
        found[short] = data
    return found


def keys_of(c: Any, architecture: str) -> dict[str, Any]:
    """The metadata. c: a config of transformers."""
    offset = c.pad_token_id + 1 if c.model_type in ("roberta", "xlm-roberta", "jina_embeddings_v3") else 0
    keys: dict[str, Any] = {
        "block_count": c.num_hidden_layers,
        "context_length": c.max_position_embeddings - offset,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.hidden_dim if c.model_type == "distilbert" else c.intermediate_size,
        "head_count": c.num_attention_heads,
        "causal_attention": False,
        "pooling_type": gguf.PoolingType.MEAN,
    }
    if architecture in ("eurobert", "gemma-embedding"):
        keys |= {"head_count_kv": c.num_key_value_heads, "layer_norm_rms_eps": c.rms_norm_eps}
        keys |= {"key_length": c.head_dim, "value_length": c.head_dim}
    elif architecture == "modern-bert":
        keys |= {"layer_norm_rms_eps": c.norm_eps, "sliding_window": c.local_attention, "sliding_window_pattern": 3}
        keys |= {"vocab_size": c.vocab_size, "hidden_act": c.hidden_activation}
    else:
        keys |= {"layer_norm_eps": getattr(c, "layer_norm_eps", 1e-12)}
        keys |= {"token_type_count": getattr(c, "type_vocab_size", 1)}
    if architecture == "gemma-embedding":
        keys |= {"sliding_window": ENCODERS["embedding-gemma"]["sliding_window"]}
    if (rope := getattr(c, "rope_parameters", None)) is not None:
        keys |= {"rope_freq_base": rope.get("full_attention", rope)["rope_theta"]}
        if "sliding_attention" in rope:
            keys |= {"rope_freq_base_swa": rope["sliding_attention"]["rope_theta"]}
        keys |= {"rope_scaling_type": gguf.RopeScalingType.NONE}
    return keys


def tensors_of(hf: Any, architecture: str, kept: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """The tensors that a converter writes. kept: of the heads."""
    c, found = hf.config, {}
    offset = c.pad_token_id + 1 if c.model_type in ("roberta", "xlm-roberta") else 0
    for name, tensor in state_of(hf).items():
        if "pooler" in name or (name.startswith(("head.", "classifier", "lm_head")) and name not in kept):
            continue
        data = tensor[offset:] if "position_embeddings" in name else tensor
        data = data + 1.0 if architecture == "gemma-embedding" and name.endswith("norm.weight") else data
        head = "classifier.out_proj" if architecture == "modern-bert" else "classifier"
        found[name.replace("classifier", head)] = data.numpy()
    return found


def both(hf: Any, name: str, architecture: str, path: Path, **options: Any) -> tuple[Any, Any]:
    """Our models of the folder and of the file."""
    folder = load(save(hf, path / "folder"), **EXPRESSED.get(name, {}))
    tensors = named(architecture, hf.config.num_hidden_layers, tensors_of(hf, architecture, **options))
    keys = keys_of(hf.config, architecture)
    if options:
        keys |= {"pooling_type": gguf.PoolingType.RANK, "classifier_output_labels": ["a", "b", "c"]}
    return folder, load(write_file(path / "model.gguf", architecture, keys, tensors))


def same(file: Any, folder: Any, *counts: int) -> None:
    for count in counts:
        ids = ids_of(count)
        assert torch.equal(hidden_of(file, [ids])[0], hidden_of(folder, [ids])[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ARCHITECTURES]
)
def test_a_file_computes_what_its_folder_computes(transformers, tmp_path, name):
    folder, file = both(oracle(transformers, name), name, ARCHITECTURES[name], tmp_path)
    assert file.config.pooling.kind == "mean"
    same(file, folder, 1, 90)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_classifiers_file_gives_its_folders_logits(transformers, tmp_path, name):
    hf = classifier(transformers, name)
    kept = tuple(k for k in state_of(hf) if k.startswith(("head.", "classifier")))
    folder, file = both(hf, name, CLASSIFIERS[name], tmp_path, kept=kept)
    assert file.tasks == folder.tasks == (Task.CLASSIFY,) and file.config.pooling.labels == ("a", "b", "c")
    assert len(file.config.pooling.labels) == LABELS
    for count in (1, 60):
        rows = hidden_of(folder, [ids_of(count)])[0]
        assert torch.equal(hidden_of(file, [ids_of(count)])[0], rows)
        assert np.array_equal(file.pool(rows.numpy(), Task.CLASSIFY), folder.pool(rows.numpy(), Task.CLASSIFY))


# --- models without transformers' code --------------------------------------------------------------


def test_a_file_of_nomics_mixture(tmp_path):
    """The converter leaves out the bias of the experts' sum."""
    state = apart.nomic_state()
    for name in [name for name in state if name.endswith("experts.bias")]:
        state[name] = torch.zeros_like(state[name])
    folder = load(apart.saved(apart.NOMIC, state, tmp_path / "folder"))
    tensors = {}
    for name, tensor in state.items():
        data = tensor.numpy()
        if ".experts.mlp." in name:
            data = data.reshape(apart.EXPERTS, apart.INNER, apart.WIDTH)
            name, data = f"{name}.weight", data.swapaxes(1, 2) if name.endswith("w2") else data
        if not name.endswith("experts.bias"):
            tensors[name] = data
    keys = {
        **{"block_count": apart.LAYERS, "context_length": 130, "embedding_length": apart.WIDTH},
        **{"feed_forward_length": apart.INNER, "head_count": apart.HEADS, "layer_norm_eps": apart.EPS},
        **{"causal_attention": False, "pooling_type": gguf.PoolingType.MEAN, "rope_freq_base": 50.0},
        **{"moe_every_n_layers": 2, "expert_count": apart.EXPERTS, "expert_used_count": 2, "token_type_count": 1},
    }
    named_tensors = named("nomic-bert-moe", apart.LAYERS, tensors)
    same(load(write_file(tmp_path / "model.gguf", "nomic-bert-moe", keys, named_tensors)), folder, 1, 60)


@pytest.mark.parametrize("separate", [False, True])
def test_a_file_of_jina_v2(tmp_path, separate):
    """Old files have the gate's matrix as a tensor of its own."""
    state = apart.jina_state()
    folder = load(apart.saved(apart.JINA, state, tmp_path / "folder"))
    tensors = named("jina-bert-v2", apart.LAYERS, {name: tensor.numpy() for name, tensor in state.items()})
    if separate:
        for i in range(apart.LAYERS):
            gate, up = np.split(tensors[f"blk.{i}.ffn_up.weight"], 2)
            tensors |= {f"blk.{i}.ffn_gate.weight": gate, f"blk.{i}.ffn_up.weight": up}
    keys = {
        **{"block_count": apart.LAYERS, "context_length": 130, "embedding_length": apart.WIDTH},
        **{"feed_forward_length": apart.INNER, "head_count": 6, "layer_norm_eps": apart.EPS},
        **{"causal_attention": False, "pooling_type": gguf.PoolingType.MEAN, "token_type_count": 2},
    }
    same(load(write_file(tmp_path / "model.gguf", "jina-bert-v2", keys, tensors)), folder, 1, 60)


def test_a_file_of_embedding_gemma_with_dense_layers(transformers, tmp_path):
    hf = oracle(transformers, "embedding-gemma")
    tensors = named("gemma-embedding", hf.config.num_hidden_layers, tensors_of(hf, "gemma-embedding"))
    random, width = np.random.default_rng(3), hf.config.hidden_size
    dense = [random.standard_normal(shape).astype(np.float32) for shape in ((96, width), (width, 96))]
    tensors |= {f"dense_{i}.weight": weight for i, weight in zip((2, 3), dense, strict=True)}
    path = write_file(tmp_path / "model.gguf", "gemma-embedding", keys_of(hf.config, "gemma-embedding"), tensors)
    file = load(path)
    rows = hidden_of(file, [ids_of(20)])[0].numpy()
    expected = dense[1] @ (dense[0] @ rows.mean(0))
    assert np.allclose(file.pool(rows), expected / np.linalg.norm(expected), atol=1e-5)


# --- refusals ---------------------------------------------------------------------------------------


class NoTensors:
    def __init__(self, shapes: dict[str, tuple[int, ...]]):
        self.shapes = shapes

    def names(self) -> Any:
        return self.shapes.keys()

    def info(self, name: str) -> Any:
        return type("Info", (), {"shape": self.shapes[name]})


SIZES = {"embedding_length": 48, "attention.head_count": 4, "feed_forward_length": 80, "block_count": 1,
         "context_length": 64, "attention.layer_norm_epsilon": 1e-5, "attention.causal": False}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "shapes", "error", "match"),
    [
        ({"pooling_type": 4}, {}, UnsupportedModel, "no classifier"),
        ({"pooling_type": 4}, {"cls.output.weight": (1, 48)}, UnsupportedModel, "the converter leaves out"),
        ({"attention.causal": True}, {}, UnsupportedModel, "causal"),
        ({"attention.key_length": 7}, {}, UnsupportedModel, "key_length"),
        (
            {"classifier.output_labels": ["a"]}, {"cls.weight": (48, 48), "cls.output.weight": (2, 48)},
            ModelFileError, "output_labels",
        ),
    ],
)  # fmt: skip
def test_files_that_cannot_be_are_refused(keys, shapes, error, match):
    metadata = {"general.architecture": "bert", **{f"bert.{key}": value for key, value in (SIZES | keys).items()}}
    with pytest.raises(error, match=match):
        hf_config_from_gguf(metadata, NoTensors({"token_embd.weight": (97, 48), **shapes}))


# --- Qwen3-Reranker ---------------------------------------------------------------------------------


def reranker(transformers: Any, labels: list[str]) -> tuple[Any, dict[str, Any], dict[str, np.ndarray]]:
    """A model, and the metadata and tensors of its file: the rows of the logits of "yes" (7) and "no" (9)."""
    config = transformers.Qwen3Config(**{**config_of("qwen3"), "tie_word_embeddings": True, "use_sliding_window": False,
                                         "layer_types": None, "sliding_window": None})  # fmt: skip
    hf = randomized(transformers.AutoModelForCausalLM.from_config(config))
    c = hf.config
    keys = {
        **{"block_count": c.num_hidden_layers, "context_length": 256, "embedding_length": c.hidden_size},
        **{"feed_forward_length": c.intermediate_size, "head_count": c.num_attention_heads},
        **{"head_count_kv": c.num_key_value_heads, "key_length": c.head_dim, "value_length": c.head_dim},
        **{"layer_norm_rms_eps": c.rms_norm_eps, "rope_freq_base": c.rope_parameters["rope_theta"]},
        **{"pooling_type": gguf.PoolingType.RANK, "classifier_output_labels": labels},
    }
    state = {name: tensor.numpy() for name, tensor in state_of(hf).items() if name != "lm_head.weight"}
    tensors = named("qwen3", c.num_hidden_layers, state)
    return hf, keys, tensors | {"cls.output.weight": state["model.embed_tokens.weight"][[7, 9]]}


@pytest.mark.filterwarnings("ignore")
def test_a_file_of_qwen3_reranker(transformers, tmp_path):
    hf, keys, tensors = reranker(transformers, ["yes", "no"])
    model = load(write_file(tmp_path / "model.gguf", "qwen3", keys, tensors))
    assert model.tasks == (Task.CLASSIFY,) and model.config.pooling.activation == "sigmoid"
    ids = ids_of(40)
    cache = make_cache(model, blocks=9, fill=float("nan"))
    rows = step(model, cache, [(ids, 0, np.arange(1, 9, dtype=np.int32))])[0].numpy()
    with torch.no_grad():
        logits = hf(torch.tensor([ids])).logits[0, -1]
    assert abs(model.pool(rows, Task.CLASSIFY)[0] - float(logits[7] - logits[9])) < TOLERANCE * logits.abs().max()


@pytest.mark.filterwarnings("ignore")
def test_other_classifiers_of_qwen3_are_refused(transformers, tmp_path):
    _, keys, tensors = reranker(transformers, ["no", "yes"])
    with pytest.raises(UnsupportedModel, match="yes and no"):
        load(write_file(tmp_path / "model.gguf", "qwen3", keys, tensors))


def test_the_template_of_two_texts():
    text = "<|im_start|>user\n<Query>: {query}\n<Document>: {document} 'ü' \\n<|im_end|>\n"
    templates = gguf_chat_templates({"tokenizer.chat_template.rerank": text})
    template = ChatTemplate(templates)
    try:
        source = template.pair_source
        assert source is not None
        found = template.render_pair(source, "{document}", "{{ 1 }}").text
        assert found == text.replace("{document}", "{{ 1 }}").replace("{query}", "{document}")
        with pytest.raises(TemplateError, match="no place for an instruction"):
            template.render_pair(source, "a", "b", "c")
    finally:
        template.close()
