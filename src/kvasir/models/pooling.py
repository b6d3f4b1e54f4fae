"""Pools the hidden rows of a text into the result of a task: an embedding, or the scores of a classifier.

    hidden rows [n, D] --kind--> a row [D] --dense--> ... --normalize--> the embedding
                                          --head--> the logits of the labels

Sources: the `modules.json`, `1_Pooling/config.json`, `2_Dense/config.json` and `sentence_bert_config.json` of
sentence-transformers folders (https://sbert.net/docs/package_reference/sentence_transformer/models.html); the
classifiers of transformers and their fields in `config.json`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.json_file import read_json, read_json_object
from kvasir.layers.module import Module, Take
from kvasir.layers.vector import FUNCTIONS, VectorLinear, VectorNorm, tree_sum
from kvasir.models.config import MAX_CONFIG_BYTES, MAX_POSITIONS, MAX_VOCAB, MAX_WIDTH, Fields
from kvasir.types import Task

KINDS = ("mean", "cls", "last", "none")
_MODES = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
_ABOUT = "config_sentence_transformers.json"
_MAX_MODULES = 16
_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,100}")  # names of tensors begin with it
_MAX_LABELS = 1 << 16
_HEADS = {
    "ForSequenceClassification": Task.CLASSIFY,
    "ForTokenClassification": Task.TOKEN_CLASSIFY,
    "Model": Task.EMBED,
}
# The classes that the files of sentence-transformers name, by our names.
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu",
                "Sigmoid": "sigmoid"}  # fmt: skip

_SCORES = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax", "Tanh": "tanh"}


@dataclass(frozen=True, slots=True)
class Dense:
    """A layer after pooling: act(W x + bias). folder: of its tensors, within the model's."""

    folder: str
    inputs: int
    outputs: int
    bias: bool = True
    act: str = "identity"


@dataclass(frozen=True, slots=True)
class TokenHeads:
    """Layers over each hidden row, as in BGE-M3 (arXiv:2402.03216). embed: size of an embedding of a token, 0 if it is
    the hidden row. weigh: whether tokens have a weight for lexical matching. unread: the checkpoint has such layers in
    a format that is not read."""

    embed: int = 0
    weigh: bool = False
    unread: bool = False

    @property
    def tasks(self) -> tuple[Task, ...]:
        """What they are for."""
        if self.unread:
            return ()
        return (Task.TOKEN_EMBED, Task.TOKEN_CLASSIFY) if self.weigh else (Task.TOKEN_EMBED,)


@dataclass(frozen=True, slots=True)
class Pooling:
    """kind: "mean" of all rows, "cls" for the first row, "last" for the last; "none" if the model is not meant for
    embeddings.

    normalize: whether the embedding is scaled to length 1. max_length: maximum tokens of a text, 0 if only the model's
    own limit applies. dense: layers before that. task: the only one that the checkpoint has a head for, None if it is
    not stated. labels, activation: of a classifier: their names, and the function of its logits that gives scores.
    tokens: the ids of one or two tokens: the classifier's logit is that of the first minus that of the second.
    token_matrix: the name of the matrix with their rows, "" for that of the model's logits.
    token_heads: layers over each row.
    """

    kind: str = "last"
    normalize: bool = True
    max_length: int = 0
    dense: tuple[Dense, ...] = ()
    task: Task | None = None
    labels: tuple[str, ...] = ()
    activation: str = ""
    tokens: tuple[int, ...] = ()
    token_matrix: str = ""
    token_heads: TokenHeads = TokenHeads()

    @np.errstate(all="ignore")  # faulty rows give infinities and NaN
    def rows(self, hidden_nD: np.ndarray) -> np.ndarray:
        """float32 [n, D], the rows of one text, to the pooled row, float32 [D]. The bits depend only on these rows.
        Raises UnsupportedModel for the kind "none"."""
        if self.kind == "none":
            raise UnsupportedModel("the model is not meant for embeddings: its pooling is none", "use another model")
        if self.kind == "mean":
            return tree_sum(hidden_nD) / np.float32(len(hidden_nD))
        return hidden_nD[0 if self.kind == "cls" else -1]

    @np.errstate(all="ignore")
    def __call__(self, hidden_nD: np.ndarray) -> np.ndarray:
        """The embedding without dense layers, float32 [D]."""
        pooled_D = self.rows(hidden_nD)
        return normalized(pooled_D) if self.normalize else pooled_D

    def token_size(self, width: int) -> int:
        """The number of dimensions of an embedding of a token. width: of the hidden rows."""
        return self.token_heads.embed or width

    def size(self, width: int) -> int:
        """The number of dimensions of an embedding. width: of the hidden rows."""
        return self.dense[-1].outputs if self.dense else width


@np.errstate(all="ignore")
def normalized_rows(x_nD: np.ndarray) -> np.ndarray:
    """Scales each row to length 1, with the bits of `normalized`."""
    length_n = np.sqrt(tree_sum(np.ascontiguousarray((x_nD * x_nD).T)))
    return x_nD / np.maximum(length_n, np.float32(1e-12))[:, None]


@np.errstate(all="ignore")
def normalized(x_D: np.ndarray) -> np.ndarray:
    """Scales the vector to length 1; zeros stay zeros."""
    length = np.sqrt(tree_sum((x_D * x_D)[:, None]))
    return x_D / np.maximum(length, np.float32(1e-12))


# --- modules ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The classifier of a family. dense, norm, out: names of the tensors of its layers, "" for none: act(dense(row)),
    then the norm, then the logits. kind: which row they get, as in `Pooling`. dense_bias, out_bias: whether they have
    one. eps, norm_bias: of the norm."""

    out: str
    dense: str = ""
    act: str = "identity"
    norm: str = ""
    kind: str = "cls"
    dense_bias: bool = True
    out_bias: bool = True
    eps: float = 1e-5
    norm_bias: bool = False


class Classifier(Module):
    """float32 [n, D] -> [n, labels], the logits."""

    def __init__(self, shape: HeadShape, width: int, labels: int):
        self.shape = shape
        self.dense = VectorLinear(width, width, shape.dense_bias) if shape.dense else None
        self.norm = VectorNorm(width, shape.eps, shape.norm_bias) if shape.norm else None
        self.out = VectorLinear(width, labels, shape.out_bias)

    def __call__(self, x_nD: np.ndarray) -> np.ndarray:
        if self.dense is not None:
            x_nD = FUNCTIONS[self.shape.act](self.dense(x_nD))
        return self.out(x_nD if self.norm is None else self.norm(x_nD))

    def names(self, path: str) -> dict[str, str]:
        """The entries of the name table. path: of this module."""
        parts = {"dense": self.shape.dense, "norm": self.shape.norm, "out": self.shape.out}
        return {f"{path}.{part}": name for part, name in parts.items() if name}


class TokenScore(Module):
    """float32 [n, D] -> [n, 1]: the logit of one token of the vocabulary, minus that of another if there are two."""

    def __init__(self, width: int, count: int):
        self.rows = [VectorLinear(width, 1, bias=False) for _ in range(count)]
        self.shape = HeadShape("", kind="last")

    @np.errstate(all="ignore")
    def __call__(self, x_nD: np.ndarray) -> np.ndarray:
        logit_n1, *other = (row(x_nD) for row in self.rows)
        return logit_n1 - other[0] if other else logit_n1


class Pooler(Module):
    """The hidden rows of one text to the result of a task. head: the family's classifier, None if it has none.
    vocabulary: the name of the matrix that gives logits, "" for none."""

    def __init__(self, pooling: Pooling, width: int, head: HeadShape | None = None, vocabulary: str = ""):
        self.pooling, self._vocabulary = pooling, pooling.token_matrix or vocabulary
        for dense, inputs in zip(pooling.dense, (width, *(d.outputs for d in pooling.dense)), strict=False):
            if dense.inputs != inputs:
                raise ModelFileError(f"{dense.folder} takes {dense.inputs} numbers and gets {inputs}",
                                     "does it belong to this model?")  # fmt: skip
        self.dense = [VectorLinear(d.inputs, d.outputs, d.bias) for d in pooling.dense]
        self.weigh = VectorLinear(width, 1) if pooling.token_heads.weigh else None
        self.classifier: Classifier | TokenScore | None = None
        if pooling.tokens:
            if not vocabulary:
                raise UnsupportedModel("a score of tokens of a model without logits", "use a model that generates")
            self.classifier = TokenScore(width, len(pooling.tokens))
        elif pooling.labels:
            if head is None:
                raise UnsupportedModel("no code for a classifier of this model", "use a model with another head")
            self.classifier = Classifier(head, width, len(pooling.labels))

    def __call__(self, hidden_nD: np.ndarray, task: str = Task.EMBED) -> np.ndarray:
        """float32: the embedding [D], the logits [labels], or a row of either per token; a weight per token. hidden:
        for embeddings of tokens, the rows of their own layer if there is one."""
        if self.classifier is not None:
            if task == Task.TOKEN_CLASSIFY:
                return self.classifier(hidden_nD)
            pooled = replace(self.pooling, kind=self.classifier.shape.kind)
            return self.classifier(pooled.rows(hidden_nD)[None])[0]
        if task == Task.TOKEN_EMBED:
            return normalized_rows(hidden_nD) if self.pooling.normalize else hidden_nD
        if task == Task.TOKEN_CLASSIFY:
            assert self.weigh is not None, "the model has no weights of tokens"
            return FUNCTIONS["relu"](self.weigh(hidden_nD))
        if not self.dense:
            return self.pooling(hidden_nD)
        row = self.pooling.rows(hidden_nD)[None]
        for layer, dense in zip(self.dense, self.pooling.dense, strict=True):
            row = FUNCTIONS[dense.act](layer(row))
        return normalized(row[0]) if self.pooling.normalize else row[0]

    def names(self) -> dict[str, str | Take | tuple[str, ...]]:
        """Where its tensors are in a checkpoint."""
        dense: dict[str, str | Take | tuple[str, ...]] = {
            f"pooler.dense.{i}": f"{dense.folder}/linear" for i, dense in enumerate(self.pooling.dense)
        }
        if isinstance(self.classifier, TokenScore):
            return {
                f"pooler.classifier.rows.{i}": Take(self._vocabulary, (token, token + 1))
                for i, token in enumerate(self.pooling.tokens)
            }
        if self.weigh is not None:
            dense["pooler.weigh"] = "sparse_linear"
        if self.pooling.token_heads.embed:
            dense["tokens"] = "colbert_linear"  # a layer of the model's own: it is computed for every row
        return dense | (self.classifier.names("pooler.classifier") if self.classifier is not None else {})


@dataclass(frozen=True, slots=True)
class TokenPair:
    """Stands for the pooling of a reranker that answers with one token or another."""

    tokens: tuple[int, ...]
    activation: str = "sigmoid"
    matrix: str = ""

    def fields(self) -> dict[str, Any]:
        """The fields of Pooling."""
        return {"kind": "last", "task": Task.CLASSIFY, "labels": ("LABEL_0",), "activation": self.activation,
                "tokens": self.tokens, "token_matrix": self.matrix}  # fmt: skip


# --- configs ----------------------------------------------------------------------------------------


def pooling_of(config: Mapping[str, Any], default: Pooling) -> Pooling:
    """The `pooling` entry of a config, as written by `read_pooling` and for GGUF files, `default` if absent; and the
    task and the labels that its architecture has a head for. Raises ModelFileError for a bad entry, UnsupportedModel
    for an unknown kind."""
    value, classified = config.get("pooling"), _classified(config)
    if isinstance(heads := config.get("pooling_tokens"), TokenHeads):
        classified["token_heads"] = heads
    if isinstance(value, TokenPair):
        return replace(default, **value.fields())
    if value is None:
        return replace(default, **classified)
    if not isinstance(value, Mapping):
        raise ModelFileError(f"config.json: pooling is {value!r}", "expected an object")
    f, dense = Fields(value, "pooling"), value.get("dense") or ()
    if not isinstance(dense, tuple) or not all(isinstance(layer, Dense) for layer in dense):
        raise ModelFileError("config.json: pooling has dense layers", "expected them in folders of their own")
    return Pooling(
        f.choice("kind", KINDS, default.kind),
        f.flag("normalize", default.normalize),
        f.integer("max_length", 0, MAX_POSITIONS, default.max_length),
        dense,
        **classified,
    )


def _classified(config: Mapping[str, Any]) -> dict[str, Any]:
    """The task that the first of a config's `architectures` is made for and, for a classifier, its labels and its
    activation, as fields of `Pooling`."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    task = next((task for end, task in _HEADS.items() if name.endswith(end)), None)
    if name.endswith("LMHeadModel"):
        task = None
    if task not in (Task.CLASSIFY, Task.TOKEN_CLASSIFY):
        return {"task": task}
    labels = _labels(Fields(config))
    return {"task": task, "labels": labels, "activation": _activation(Fields(config), len(labels))}


def _labels(f: Fields) -> tuple[str, ...]:
    """The names of the labels, in order of the logits."""
    named = f.get("id2label")
    if named is None:
        return tuple(f"LABEL_{i}" for i in range(f.integer("num_labels", 1, _MAX_LABELS, 2)))
    if not isinstance(named, Mapping) or not 0 < len(named) <= _MAX_LABELS:
        raise ModelFileError(f"{f.where}: id2label is not an object with names of labels")
    found = {str(key): name for key, name in named.items()}
    labels = tuple(found.get(str(i)) for i in range(len(found)))
    if not all(isinstance(label, str) for label in labels):
        raise ModelFileError(f"{f.where}: id2label does not name the labels 0 to {len(found) - 1}")
    return labels  # type: ignore[return-value]


def _activation(f: Fields, labels: int) -> str:
    """The function of the logits: the one that sentence-transformers wrote, else the usual one of the problem."""
    own = f.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or f.get("sbert_ce_default_activation_function")
    if named is not None:
        return score_named(f.where, named)
    problem = f.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def score_named(where: str, name: Any) -> str:
    """Our name of the function of logits that gives scores. Raises UnsupportedModel."""
    return activation_named(where, name, _SCORES)


def activation_named(where: str, name: Any, known: Mapping[str, str] = _ACTIVATIONS) -> str:
    """Our name of an activation that a file names by its class in torch. Raises UnsupportedModel."""
    found = known.get(name.rpartition(".")[2]) if isinstance(name, str) else None
    if found is None:
        raise UnsupportedModel(f"{where}: the activation {quoted(name)} is not supported",
                               f"supported: {', '.join(known)} of torch.nn")  # fmt: skip
    return found


# --- folders ----------------------------------------------------------------------------------------


def read_pooling(folder: str | Path) -> dict[str, Any]:
    """{"pooling": {...}} to merge into the folder's config; {} if it is not a sentence-transformers folder.

    Raises UnsupportedModel for modules and modes without code (max), ModelFileError for bad files.
    """
    folder = Path(folder)
    if not (folder / "modules.json").is_file():
        return {}
    modules = _module_paths(folder)
    kinds = [kind for kind, _ in modules]
    if kinds == ["Transformer", "LogitScore"]:
        return {"pooling": _read_tokens(folder, dict(modules)["LogitScore"])}
    if kinds == ["Transformer"]:  # a cross-encoder: the classifier is the model's own
        return {"sentence_transformers": {"activation_fn": named}} if (named := _activation_fn(folder)) else {}
    dense = kinds.count("Dense")
    usual = ["Transformer", "Pooling", *["Dense"] * dense]
    if kinds not in (usual, [*usual, "Normalize"]):
        raise UnsupportedModel(
            f"{folder / 'modules.json'}: the modules are {', '.join(kinds)}",
            "supported: Transformer, Pooling and optionally Dense modules and Normalize",
        )
    paths = dict(modules)
    pooling: dict[str, Any] = {"kind": _read_kind(folder / paths["Pooling"]), "normalize": "Normalize" in kinds}
    lengths = folder / paths["Transformer"] / "sentence_bert_config.json"
    if lengths.is_file():
        f = Fields(read_json_object(lengths, MAX_CONFIG_BYTES), lengths.name)
        pooling["max_length"] = f.integer("max_seq_length", 1, MAX_POSITIONS, 0)
    if dense:
        pooling["dense"] = tuple(_read_dense(folder, path) for kind, path in modules if kind == "Dense")
    return {"pooling": pooling}


def _module_paths(folder: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each module, in order. Raises ModelFileError for a path outside the model's folder."""
    modules = read_json(folder / "modules.json", MAX_CONFIG_BYTES)
    if not isinstance(modules, list) or not 0 < len(modules) <= _MAX_MODULES:
        raise ModelFileError(f"{folder / 'modules.json'} is not a short list of modules")
    paths: list[tuple[str, str]] = []
    for module in modules:
        kind, path = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(path, str):
            raise ModelFileError(f"{folder / 'modules.json'}: a module has no type and path")
        if not _is_inside(folder, path):
            raise ModelFileError(f"{folder / 'modules.json'}: the path {quoted(path)} is none of the model's folder")
        paths.append((kind.rpartition(".")[2], path))
    return paths


def _is_inside(folder: Path, path: str) -> bool:
    """Whether the path lies inside the folder and is a valid file name."""
    try:
        (folder / path).exists()
        return (folder / path).resolve().is_relative_to(folder.resolve())
    except (ValueError, OSError):  # a zero byte, a lone surrogate, or too long
        return False


def _read_kind(folder: Path) -> str:
    path = folder / "config.json"
    f = Fields(read_json_object(path, MAX_CONFIG_BYTES), str(path))
    f.expect("include_prompt", True)
    named = f.get("pooling_mode")  # newer files name the mode instead of setting a flag
    if named is not None:
        return f.choice("pooling_mode", ("mean", "cls", "lasttoken")).removesuffix("token")
    modes = [name for name, value in f.values.items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(f"{path}: the pooling is {', '.join(modes) or 'none'}",
                               f"supported: one of {', '.join(_MODES)}")  # fmt: skip
    return _MODES[modes[0]]


def _read_tokens(folder: Path, path: str) -> TokenPair:
    file = folder / path / "config.json"
    f = Fields(read_json_object(file, MAX_CONFIG_BYTES), str(file))
    tokens = [f.integer("true_token_id", 0, MAX_VOCAB - 1)]
    if f.get("false_token_id") is not None:
        tokens.append(f.integer("false_token_id", 0, MAX_VOCAB - 1))
    named = _activation_fn(folder)
    return TokenPair(tuple(tokens), "sigmoid" if named is None else score_named(_ABOUT, named))


def _activation_fn(folder: Path) -> Any:
    """What a folder's file names as the function of the logits; None if it names none."""
    about = folder / _ABOUT
    return read_json_object(about, MAX_CONFIG_BYTES).get("activation_fn") if about.is_file() else None


def _read_dense(folder: Path, path: str) -> Dense:
    if not _PLAIN.fullmatch(path):
        raise ModelFileError(
            f"{folder / 'modules.json'}: the folder {quoted(path)} of a module", "expected a plain name"
        )
    file = folder / path / "config.json"
    f = Fields(read_json_object(file, MAX_CONFIG_BYTES), str(file))
    act = f.get("activation_function")
    return Dense(
        path,
        f.integer("in_features", 1, MAX_WIDTH),
        f.integer("out_features", 1, MAX_WIDTH),
        f.flag("bias", True),
        "tanh" if act is None else activation_named(f.where, act),
    )
