"""Models from quantized checkpoints compute what the decoded weights compute, on both executors."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.numpy import save_file  # noqa: E402

from kvasir.ops import native  # noqa: E402
from kvasir.runner.load import LoadOptions, load_model  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from tests._shared import need  # noqa: E402
from tests.models.driver import logits_of  # noqa: E402
from tests.models.families import config_of  # noqa: E402
from tests.models.hf import load  # noqa: E402
from tests.models.oracle import distance, dummy_source, random_ids  # noqa: E402
from tests.program.made import Driver, program_of  # noqa: E402
from tests.weights.published.encode import write  # noqa: E402

VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def gpt_oss(folder: Path, packed: bool) -> Path:
    """A gpt-oss whose experts are in MXFP4, as published, or decoded."""
    from kvasir.models.registry import model_class_for

    config = {**config_of("gpt-oss"), "intermediate_size": 32, "architectures": ["GptOssForCausalLM"]}
    kind = model_class_for(config)
    source = dummy_source(kind(kind.Config.from_hf(config)))
    tensors = {name: source.array(name) for name in source.names() if ".mlp.experts." not in name}
    rng = np.random.default_rng(0)
    experts, width, inner = 5, 64, 32
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp.experts."
        for part, rows, cols in (("gate_up_proj", 2 * inner, width), ("down_proj", width, inner)):
            blocks = rng.integers(0, 256, (experts, rows, cols // 32, 16), dtype=np.uint8)
            scales = rng.integers(123, 126, (experts, rows, cols // 32), dtype=np.uint8)
            tensors[f"{prefix}{part}_bias"] = rng.normal(size=(experts, rows)).astype(np.float32) * 0.1
            if packed:
                tensors[f"{prefix}{part}_blocks"], tensors[f"{prefix}{part}_scales"] = blocks, scales
                continue
            codes = np.stack((blocks & 15, blocks >> 4), axis=-1).reshape(experts, rows, cols // 32, 32)
            values = VALUES[codes] * np.exp2(scales[..., None].astype(np.float32) - 127)
            tensors[f"{prefix}{part}"] = np.ascontiguousarray(values.reshape(experts, rows, cols).swapaxes(1, 2))
    if packed:
        config["quantization_config"] = {
            "quant_method": "mxfp4",
            "modules_to_not_convert": ["model.layers.*.self_attn"],
        }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_gpt_oss_as_published(tmp_path):
    packed, plain = (gpt_oss(tmp_path / name, name == "packed") for name in ("packed", "plain"))
    ids = random_ids(60, 96)
    expected = logits_of(load(plain), ids)
    assert torch.equal(logits_of(load(packed), ids), expected)
    if not native.available():
        return
    model = load_model(find_model(str(packed)), "float32", options=LoadOptions("program"))
    assert model.formats["MXFP4"] and any("45 as MXFP4" in note for note in model.notes), model.notes
    driver = Driver(program_of(model), ids)
    driver.hidden(0, len(ids) - 1)
    driver.hidden(len(ids) - 1, 1)
    found = torch.from_numpy(driver.program.logits_of([0]).copy())
    assert distance(found[0], expected[-1]) < 0.05, "its kernels round the rows to int8"


@pytest.mark.parametrize(
    ("name", "packed", "most"), [("fp8-blocks", "FP8", 0.02), ("mlx-4", "AFFINE4", 0.08), ("llm-int8", "INT8", 0.1)]
)
def test_experts_keep_their_codes(name, packed, most, tmp_path):
    from kvasir.models.registry import model_class_for

    sizes = dict.fromkeys(("hidden_size", "moe_intermediate_size", "intermediate_size"), 128)
    config = {**config_of("qwen3-moe"), **sizes, "architectures": ["Qwen3MoeForCausalLM"]}
    kind = model_class_for(config)
    source = dummy_source(kind(kind.Config.from_hf(config)))
    tensors = {name: source.array(name).astype(np.float32) for name in source.names()}
    folder, ids = write(tmp_path, config, tensors, name), random_ids(40, config["vocab_size"])
    expected = logits_of(load(folder), ids)
    if not native.available():
        return
    model = load_model(find_model(str(folder)), "float32", options=LoadOptions("program"))
    assert set(model.formats) == {packed, "BF16"}
    assert not any("where matrices share their rows" in note for note in model.notes), model.notes
    found = torch.from_numpy(Driver(program_of(model), ids).logits(0, len(ids)))
    assert distance(found, expected) < most, "rounded rows, which may choose another expert"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ct_FP8_BLOCK", "ct_NVFP4A16", "ct_W4A16", "ct_MXFP4A16", "bnb_nf4"])
def test_a_folder_of_a_package_computes_what_its_decoded_weights_do(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is the oracle of this test")
    folder = need("fixtures", "quantized", name)
    model = load(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    from kvasir.runner.load import open_checkpoint
    from kvasir.weights.local import find_local

    _, source = open_checkpoint(find_local(folder))
    decoded = {n: np.ascontiguousarray(source.array(n).astype(ml_dtypes.bfloat16)) for n in source.names()}
    save_file(decoded, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = random_ids(50, 256)
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    # the package rounds code times scale to bfloat16; Q4_0 does not
    assert distance(logits_of(model, ids), expected) < (1e-2 if name == "ct_W4A16" else 1e-4)
