"""BitNet against transformers' own BitLinear and AutoBitLinear on a CPU, from every form of its checkpoints: packed
codes, codes as numbers, weights to round, and GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", reason="transformers is the oracle of these tests")

from safetensors.torch import save_file  # noqa: E402
from transformers.utils.quantization_config import BitNetQuantConfig  # noqa: E402

from kvasir.errors import ModelFileError, UnsupportedModel  # noqa: E402
from kvasir.ops import native  # noqa: E402
from kvasir.runner.load import LoadOptions, load_model, open_checkpoint  # noqa: E402
from kvasir.weights.find import find_model  # noqa: E402
from kvasir.weights.local import find_local  # noqa: E402
from tests.models.driver import logits_of  # noqa: E402
from tests.models.hf import load  # noqa: E402
from tests.models.oracle import TOLERANCE, distance, random_ids, randomized  # noqa: E402
from tests.program.made import Driver, program_of  # noqa: E402

with mock.patch.object(torch, "compile", lambda function: function):  # the import alone would start a compiler
    from transformers.integrations.bitnet import BitLinear, pack_weights, replace_with_bitnet_linear

CONFIG: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-3, "bos_token_id": 0,
    "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
IDS = random_ids(70, 96)
needs_native = pytest.mark.skipif(not native.available(), reason=f"native kernels: {native.reason()}")
FORMS = {
    "bitlinear": {"linear_class": "bitlinear"},
    "offline": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "numbers": {"linear_class": "autobitlinear", "quantization_mode": "offline"},
    "online": {"linear_class": "autobitlinear", "quantization_mode": "online"},
}
FAST = ("bitlinear", "online")


def made(form: str, folder: Path, kind: str = "bitnet", scale_bits: int = 7) -> tuple[Path, Any]:
    """A folder, and transformers' model of it. Scales have few bits, so that GGUF's float16 has them, too."""
    config = transformers.AutoConfig.for_model(kind, **CONFIG)
    plain = randomized(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    state = {name: t.clone() for name, t in plain.state_dict().items()}
    settings = BitNetQuantConfig(**FORMS[form])
    model = replace_with_bitnet_linear(plain, ["lm_head"], settings).to_empty(device="cpu")
    stored: dict[str, torch.Tensor] = {}
    for index, name in enumerate(list(state)):
        if "_proj" not in name or form == "online":
            stored[name] = state[name]
            continue
        codes = torch.clamp(torch.round(state[name] / state[name].abs().mean()), -1, 1)
        scale = torch.tensor([(1 + index % (1 << scale_bits) / (1 << scale_bits)) / 8])
        stored[name] = pack_weights(codes.clone()) if form in ("bitlinear", "offline") else codes
        stored[f"{name}_scale"] = 1 / scale if form == "bitlinear" else scale
        state[name] = stored[name] if form == "bitlinear" else codes
        state[f"{name}_scale"] = stored[f"{name}_scale"]
    for rotary in [m for m in model.modules() if hasattr(m, "inv_freq")]:
        rotary.__init__(config)
    for name, value in model.named_buffers():
        if name in state:
            value.copy_(state[name])
    model.load_state_dict(state, strict=False)
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors")
    quantization = {"quant_method": "bitnet", **FORMS[form]}
    whole = {**config.to_dict(), "architectures": [type(plain).__name__], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder, model.eval()


@torch.no_grad()
def reference(model: Any) -> torch.Tensor:
    return model(torch.tensor([IDS])).logits[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
                                  for name in FORMS])  # fmt: skip
def test_logits_agree(form, tmp_path):
    folder, theirs = made(form, tmp_path / form)
    expected = reference(theirs)
    found = logits_of(load(folder), IDS)
    close = (found - expected).abs().amax(-1) < TOLERANCE * expected.abs().max()
    assert close.float().mean() > 0.9, "all but rows with a value that rounds either way"
    assert distance(found, expected) < 0.02


@needs_native
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bitnet", pytest.param("llama", marks=pytest.mark.slow)])
def test_a_program_keeps_codes_and_rounds_whole_rows(kind, tmp_path):
    folder, theirs = made("offline", tmp_path / kind, kind)
    model = load_model(find_model(str(folder)), "float32", options=LoadOptions("program"))
    assert set(model.formats) == {"TERNARY", "F32"} and any("7 as BITNET" in note for note in model.notes)
    found = Driver(program_of(model), IDS).logits(0, len(IDS))
    expected = reference(theirs).numpy()
    close = np.abs(found - expected).max(-1) < TOLERANCE * np.abs(expected).max()
    assert close.mean() > 0.9 and np.abs(found - expected).max() < 0.02 * np.abs(expected).max()
    driven, parts, start = Driver(program_of(model, threads=2, fill=np.nan), IDS), [], 0
    for count in (1, 30, len(IDS) - 31):
        parts.append(driven.logits(start, count))
        start += count
    assert np.array_equal(np.concatenate(parts).view(np.uint32), found.view(np.uint32))


@needs_native
def test_a_product_is_that_of_bitlinear():
    from kvasir.ops.linear.native import product
    from kvasir.ops.linear.packed import pack_rows
    from kvasir.weights.published.bitnet import to_blocks

    rng = np.random.default_rng(0)
    codes, x = rng.integers(0, 3, (40, 512), dtype=np.uint8), rng.standard_normal((6, 512), np.float32)
    x[2], x[3, 7], x[4] = 0, 1e3, x[4] * 1e-8
    layer = BitLinear(512, 40, False, dtype=torch.float32)
    layer.weight, layer.weight_scale = pack_weights(torch.tensor(codes.astype(np.float32) - 1)), torch.tensor([3.0])
    expected = layer(torch.tensor(x)).numpy()
    packed = pack_rows("BITNET", to_blocks(codes, np.float32(1) / np.float32(3)), 40, 512, 2)
    assert packed.activation == "q8_row"
    assert np.allclose(
        product(packed, x) * np.float32(packed.scale), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max()
    )


def test_a_file_computes_what_its_folder_computes(tmp_path):
    """As llama.cpp writes them: TQ2_0 of weights with their scale, or with a scale beside them."""
    gguf = pytest.importorskip("gguf", reason="gguf is the oracle of this test")
    folder, _ = made("numbers", tmp_path / "folder")
    _, source = open_checkpoint(find_local(folder))
    expected = logits_of(load(folder), IDS)
    for beside in (False, True):
        path = tmp_path / f"{beside}.gguf"
        write_gguf(gguf, path, source, beside)
        model = load(path)
        assert torch.equal(logits_of(model, IDS), expected)


def write_gguf(gguf: Any, path: Path, source: Any, beside: bool) -> None:
    writer = gguf.GGUFWriter(path, "bitnet")
    writer.add_context_length(CONFIG["max_position_embeddings"])
    writer.add_embedding_length(CONFIG["hidden_size"])
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_feed_forward_length(CONFIG["intermediate_size"])
    writer.add_head_count(CONFIG["num_attention_heads"])
    writer.add_head_count_kv(CONFIG["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(CONFIG["rms_norm_eps"])
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(1.0)
    writer.add_string("bitnet.hidden_activation", "relu2")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BITNET, CONFIG["num_hidden_layers"])
    older = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}  # the names that the table has
    for name in source.names():
        values = np.asarray(source.array(name), np.float32)
        known = next((name.replace(new, old) for new, old in older.items() if new in name), name)
        stored = table.get_name(known, (".weight",)) or "output.weight"  # of which the table has none: it is tied
        if source.info(name).dtype != "BITNET":
            writer.add_tensor(stored, values)
            continue
        scale = np.abs(values).max()
        if beside:
            writer.add_tensor(stored.replace(".weight", ".scale"), scale.reshape(1))
            values = values / scale
        kind = gguf.GGMLQuantizationType.TQ2_0
        writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_what_cannot_be_read_is_refused(tmp_path):
    folder, _ = made("offline", tmp_path / "folder")

    def opened(**changes: Any) -> None:
        config = json.loads((folder / "config.json").read_text())
        settings = {**config["quantization_config"], **changes.pop("quantization_config", {})}
        path = tmp_path / "changed"
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({**config, **changes, "quantization_config": settings}))
        (path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        load(path)

    for field, value in (("use_rms_norm", True), ("linear_class", "linear"), ("quantization_mode", "none")):
        with pytest.raises(UnsupportedModel, match=field):
            opened(quantization_config={field: value})
    with pytest.raises(UnsupportedModel, match="mixtral"):
        opened(model_type="mixtral")
    with pytest.raises(ModelFileError, match="modules_to_not_convert"):
        opened(quantization_config={"modules_to_not_convert": 3})
