"""Quantized weights against llama.cpp: kvasir-mini, quantized by llama.cpp itself, and its logits on the same ids.

Both round the rows that meet the weights to int8, each in its own way, so that the two may lie as far from each other
as each from the decoded weights.
"""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("gguf", reason="gguf writes the file that llama.cpp quantizes")

from benchmarks.peers.environments import llama_bin, llama_python, missing_llama
from benchmarks.peers.places import PEERS
from kvasir.ops import native as door
from tests.program.made import Driver, program_of
from tests.program.mini import ids_of, write_mini
from tests.program.test_quantized import eager_logits, error, program

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(not door.available(), reason=f"native kernels: {door.reason()}"),
    pytest.mark.skipif(bool(missing_llama(PEERS)), reason=missing_llama(PEERS) or ""),
]

# rms of the difference, relative to that of the logits, above what was measured with AVX-512 on both sides.
BOUNDS = {
    "BF16": 0.004, "F16": 0.0005,  # llama.cpp rounds their rows to them; here they stay float32
    "Q8_0": 0.013, "Q4_0": 0.013, "Q4_1": 0.013, "Q5_0": 0.013, "Q5_1": 0.013, "IQ4_NL": 0.013, "MXFP4": 0.013,
    "Q2_K": 0.013, "Q3_K_M": 0.013, "Q4_K_M": 0.013, "Q5_K_M": 0.013, "Q6_K": 0.013, "IQ4_XS": 0.013,
    "TQ1_0": 0.03, "TQ2_0": 0.03,
    "IQ3_S": 0.025, "Q1_0": 0.025,  # here they become Q8_0
}  # fmt: skip

# Makes the files, and writes the logits of each beside it.
SCRIPT = """
import ctypes, json, os, sys
import numpy as np
import llama_cpp as api

folder, kinds, ids = json.load(sys.stdin)
quiet = api.llama_log_callback(lambda level, text, data: None)
api.llama_log_set(quiet, ctypes.c_void_p(0))
api.llama_backend_init()
for kind in kinds:
    path = f"{folder}/{kind}.gguf".encode()
    if not os.path.exists(path):
        params = api.llama_model_quantize_default_params()
        params.nthread, params.ftype = 1, getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
        assert not api.llama_model_quantize(f"{folder}/BF16.gguf".encode(), path, ctypes.byref(params)), kind
    model = api.llama_model_load_from_file(path, api.llama_model_default_params())
    assert model, kind
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads, params.n_threads_batch = 256, 256, 256, 1, 1
    params.type_k = params.type_v = api.GGML_TYPE_F32
    params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = api.llama_init_from_model(model, params)
    batch = api.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    assert api.llama_decode(context, batch) == 0
    width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    np.save(f"{folder}/{kind}.npy", np.ctypeslib.as_array(api.llama_get_logits(context), (len(ids), width)))
    api.llama_free(context)
    api.llama_model_free(model)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Holds KIND.gguf and KIND.npy, llama.cpp's logits float32 [ids, vocabulary], for each of BOUNDS."""
    where = tmp_path_factory.mktemp("llama")
    for kind in ("BF16", "MXFP4"):  # this one is left out by llama.cpp where there are no experts
        write_mini(where / f"{kind}.gguf", kind)
    subprocess.run(
        [str(llama_python(PEERS)), "-c", SCRIPT],
        input=json.dumps([str(where), list(BOUNDS), ids_of()]).encode(),
        env={**os.environ, "LLAMA_CPP_LIB_PATH": str(llama_bin(PEERS))},
        check=True,
    )
    return where


@pytest.mark.parametrize("kind", BOUNDS)
def test_logits_are_those_of_llama_cpp(folder, kind):
    path, ids = folder / f"{kind}.gguf", ids_of()
    theirs = np.load(folder / f"{kind}.npy")
    ours = Driver(program_of(program(path)), ids).logits(0, len(ids))
    decoded = eager_logits(path, ids)
    assert error(ours, theirs, ids).rms < BOUNDS[kind]
    assert error(ours, decoded, ids).rms < 1.1 * error(theirs, decoded, ids).rms  # no less exact
