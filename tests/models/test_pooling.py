"""Pooling: the rows it takes, the length it gives, and what it reads from sentence-transformers folders."""

import json
import re

import numpy as np
import pytest

from kvasir.errors import ModelFileError, UnsupportedModel, quoted
from kvasir.models.pooling import Pooling, pooling_of, read_pooling


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 129])
def test_kinds_against_float64(n):
    hidden = np.random.default_rng(n).standard_normal((n, 24), np.float32)
    exact = hidden.astype(np.float64)
    for kind, expected in (("mean", exact.mean(0)), ("cls", exact[0]), ("last", exact[-1])):
        assert np.allclose(Pooling(kind, normalize=False)(hidden), expected, atol=1e-6)
        unit = Pooling(kind, normalize=True)(hidden)
        assert unit.dtype == np.float32
        assert np.allclose(unit, expected / np.linalg.norm(expected), atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 13, 64, 1001])
def test_every_operation_is_rounded_in_the_documented_order(n):
    """One number at a time: the rows are added by halving, then divided; so are the squares of the length."""

    def halved(rows):
        while len(rows) > 1:
            half = len(rows) // 2
            rows = [a + b for a, b in zip(rows[:half], rows[half : 2 * half], strict=True)] + rows[2 * half :]
        return rows[0]

    hidden = np.random.default_rng(n).standard_normal((n, 7), np.float32) * np.float32(100)
    mean = [halved([*column]) / np.float32(n) for column in hidden.T]
    length = np.sqrt(halved([x * x for x in mean]))
    assert Pooling("mean", normalize=False)(hidden).tolist() == mean
    assert Pooling("mean")(hidden).tolist() == [x / length for x in mean]
    assert np.array_equal(Pooling("mean")(np.repeat(hidden, 2, 1)[:, ::2]), Pooling("mean")(hidden))


def test_infinities_pass_without_a_warning():
    hidden = np.full((3, 4), np.inf, np.float32)
    assert np.isnan(Pooling("mean")(hidden)).all()


def test_a_model_without_pooling_has_no_embedding():
    with pytest.raises(UnsupportedModel, match="not meant for embeddings"):
        Pooling("none")(np.zeros((3, 4), np.float32))


def test_zeros_stay_zeros():
    assert not Pooling("mean")(np.zeros((3, 4), np.float32)).any()


def folder(tmp_path, kinds, pooling, length=None):
    modules = [
        {"idx": i, "name": str(i), "path": "" if kind == "Transformer" else f"{i}_{kind}",
         "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if length is not None:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    return tmp_path


@pytest.mark.parametrize(
    ("flag", "kind"),
    [
        ("pooling_mode_mean_tokens", "mean"),
        ("pooling_mode_cls_token", "cls"),
        ("pooling_mode_lasttoken", "last"),
    ],
)
def test_a_folder_is_read(tmp_path, flag, kind):
    path = folder(tmp_path, ["Transformer", "Pooling", "Normalize"], {flag: True, "pooling_mode_x": False}, 256)
    found = pooling_of(read_pooling(path), Pooling("last", False))
    assert found == Pooling(kind, normalize=True, max_length=256)


def test_without_a_normalize_module_the_length_stays(tmp_path):
    path = folder(tmp_path, ["Transformer", "Pooling"], {"pooling_mode": "lasttoken"})
    assert pooling_of(read_pooling(path), Pooling("mean")) == Pooling("last", normalize=False)


def test_another_folder_leaves_the_models_default(tmp_path):
    assert read_pooling(tmp_path) == {}
    assert pooling_of({}, Pooling("cls", False, 7)) == Pooling("cls", False, 7)


def test_a_cross_encoder_names_the_function_of_its_logits(tmp_path):
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Transformer", "path": ""}]))
    assert read_pooling(tmp_path) == {}
    about = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(about))
    config = {"architectures": ["BertForSequenceClassification"], "num_labels": 1, **read_pooling(tmp_path)}
    assert pooling_of(config, Pooling("cls")).activation == "identity"


@pytest.mark.parametrize(
    ("kinds", "pooling"),
    [
        (["Transformer", "Pooling", "WordWeights"], {"pooling_mode_mean_tokens": True}),
        (["Transformer", "Dense", "Pooling"], {"pooling_mode_mean_tokens": True}),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "include_prompt": False}),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}),
        (["Transformer", "Pooling"], {"pooling_mode": "weightedmean"}),
        (["Transformer", "Pooling"], {}),
    ],
)
def test_modules_and_modes_without_code_are_refused(tmp_path, kinds, pooling):
    with pytest.raises(UnsupportedModel):
        read_pooling(folder(tmp_path, kinds, pooling))


@pytest.mark.parametrize("path", ["../other", "/etc", "\ud800", "x" * 10_000])
def test_a_path_out_of_the_folder_is_refused(tmp_path, path):
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Transformer", "path": path}]))
    with pytest.raises(ModelFileError, match=re.escape(quoted(path))):
        read_pooling(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", "[1]", '[{"type": 1, "path": ""}]'])
def test_a_bad_modules_file_is_refused(tmp_path, text):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ModelFileError):
        read_pooling(tmp_path)
