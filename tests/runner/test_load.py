"""Which executor a model is loaded for, and what is refused before its weights are read."""

import pytest
import torch

from kvasir.errors import ConfigError
from kvasir.layers.tensors import tensor_of
from kvasir.ops import native
from kvasir.parallel import SOLO
from kvasir.parallel.local import LocalRanks
from kvasir.runner.load import LoadOptions, load_model, no_attention, open_checkpoint, split
from kvasir.runner.weight_sizes import weight_bytes
from kvasir.weights.find import find_model
from tests.runner.made import files_of

needs_native = pytest.mark.skipif(not native.available(), reason=native.reason())


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return files_of(tmp_path_factory.mktemp("llama"), intermediate_size=128)


@needs_native
@pytest.mark.parametrize(("executor", "traced"), [("auto", True), ("program", True), ("eager", False)])
def test_auto_chooses_a_program_if_the_model_supports_it(files, executor, traced):
    loaded = load_model(files, options=LoadOptions(executor))
    assert (loaded.trace is not None) == traced and not loaded.notes
    assert bool(loaded.formats) == traced


@pytest.mark.parametrize(
    ("options", "device", "named"),
    [({"block_size": 24}, "cpu", "24"), ({"block_size": 8}, "cpu", "8"), ({}, "meta", "meta")],
)
def test_without_a_program_auto_states_the_reason_and_program_is_refused(files, options, device, named):
    with pytest.raises(ConfigError, match=named) as error:
        load_model(files, device=device, options=LoadOptions("program", **options))
    assert "--executor auto" in str(error.value)
    with pytest.raises(ConfigError, match=named):
        load_model(files, device=device, options=LoadOptions("auto", quantize="q8", **options))
    if device == "cpu":
        loaded = load_model(files, options=LoadOptions("auto", **options))
        assert loaded.trace is None
        assert len(loaded.notes) == 1 and "eager" in loaded.notes[0] and named in loaded.notes[0]


def test_the_eager_executor_does_not_quantize(files):
    with pytest.raises(ConfigError, match="quantize"):
        load_model(files, options=LoadOptions("eager", quantize="q4"))


@needs_native
def test_the_error_for_an_unknown_quantization_lists_the_supported_ones(files):
    with pytest.raises(ConfigError, match=r"'q5'.*q8.*q4"):
        load_model(files, options=LoadOptions("program", quantize="q5"))


@pytest.mark.parametrize("executor", ["eager", pytest.param("program", marks=needs_native)])
@pytest.mark.parametrize("name", ["layers.3", "attention.7", "first"])
def test_an_output_that_the_model_lacks_is_named(files, executor, name):
    with pytest.raises(ConfigError, match=rf"{name!r}.*layers\.2"):
        load_model(files, options=LoadOptions(executor, hidden=("last", name)))


@pytest.mark.parametrize("executor", ["eager", pytest.param("program", marks=needs_native)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_refused_if_they_do_not_fit_and_counted_before_they_are_read(files, monkeypatch, executor, dtype):
    seen = []
    free = 10 * 2**20
    monkeypatch.setattr("kvasir.device.available", lambda kind: free)
    loaded = load_model(files, dtype, options=LoadOptions(executor))
    _, source = open_checkpoint(files)
    if executor == "eager":
        model = type(loaded.model)(loaded.model.config)
        assert weight_bytes(model, source, loaded.dtype) == loaded.held
    free = loaded.held - 1 if executor == "eager" else loaded.held // 20  # programs stream most of the weights
    with pytest.raises(ConfigError, match="MiB"):
        load_model(files, dtype, progress=lambda *done: seen.append(done), options=LoadOptions(executor))
    assert not seen
    free = loaded.held
    assert load_model(files, dtype, options=LoadOptions(executor)).held == free


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("family", ["llama", "qwen3-next"])
def test_counted_bytes_equal_held_bytes_with_padding_and_shards(tmp_path, family, rank):
    """112 inputs of an MLP are 8 segments of 14, which bfloat16 pads to 32 each."""
    files = files_of(tmp_path, family, intermediate_size=112)
    options = LoadOptions(mesh=SOLO if rank is None else LocalRanks(2).meshes[rank])
    loaded = load_model(files, "bfloat16", options=options)
    _, source = open_checkpoint(files)
    model = type(loaded.model)(loaded.model.config)
    if rank is not None:
        split(model, options.mesh, source, loaded.dtype, None)
    assert weight_bytes(model, source, loaded.dtype) == loaded.held


def test_attention_without_a_kernel_has_a_reason(files):
    model = load_model(files).model
    assert no_attention(model) == ""
    model.layers[1].attn.head_dim = 33
    assert "33" in no_attention(model)


def test_the_model_is_the_same_under_both_executors(files):
    if not native.available():
        pytest.skip(native.reason())
    eager, program = (load_model(files, "float32", options=LoadOptions(e)) for e in ("eager", "program"))
    same = "architecture", "dtype", "num_parameters", "bytes", "config"
    assert [getattr(eager, name) for name in same] == [getattr(program, name) for name in same]
    assert eager.held == 4 * eager.num_parameters


def test_a_folder_and_its_config_are_opened_together(files):
    config, source = open_checkpoint(files)
    assert config["model_type"] == "llama" and "model.norm.weight" in set(source.names())
    assert tensor_of(source.array("model.norm.weight")).dtype == torch.float32
    assert find_model(files.root).weights == files.weights
