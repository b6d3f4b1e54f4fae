"""The place in which the commands of the pages run: a home folder whose store and files have the names that the pages
use, so that the commands run as they stand. All models are the bundled one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from kvasir.weights.find import find_model
from tests.docs import ROOT

MINI = find_model("kvasir-mini").root
# Names in the store, each of which stands for the bundled model there.
NAMES = (
    "MODEL", "mario", "mine", "qwen3", "qwen3-0.6b", "qwen3-8b", "qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF:Q8_0",
    "sentence-transformers/all-MiniLM-L6-v2",
)  # fmt: skip
REQUEST = {"model": "kvasir-mini", "prompt": "Once", "max_tokens": 4}
TEXTS = {
    "question.txt": "What is 23 + 45?",
    "documents.txt": "Paris is a capital.\nCats are animals.\n",
    "parser.py": "def f(): ...\n",
    "Modelfile": "FROM qwen3\nSYSTEM You are Mario.\n",
    "person.json": json.dumps({"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}}),
    "questions.jsonl": json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": REQUEST}),
    "keys.json": json.dumps([{"name": "ann", "key": "ann-2f8c0e6d1b"}]),
    "key": "a key of the fleet, long enough",
    "fleet.yaml": "models:\n  - model: qwen3-8b\n",
}
TRACES = {"azure_llm_2023_conv.csv": "azure", "requests.csv": "azure"} | dict.fromkeys(
    ("mooncake.jsonl", "mooncake_conversation_0-30min.jsonl"), "mooncake"
)
LINKS = ("benchmarks", "deploy", "recipes", "scripts", "tests")


def make_place(folder: Path) -> Path:
    """Fills an empty folder, and returns it. It is the home of the commands, too."""
    folder.mkdir(parents=True)
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o600)
    for name, kind in TRACES.items():
        (folder / name).write_text(_trace(kind))
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    for name in ("path/to/folder", "weights"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(MINI, folder / name)
    shutil.copy(MINI / "config.json", folder)
    _write_weights(folder)
    _write_certificate(folder)
    return write_commands(folder)


def write_commands(folder: Path) -> Path:
    """The commands that pages use, with this interpreter."""
    (folder / "bin").mkdir()
    for name, command in {"kvasir": f"{sys.executable} -m kvasir.cli", "python": sys.executable}.items():
        (folder / "bin" / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / "bin" / name).chmod(0o755)
    return folder


def fill_store(folder: Path) -> None:
    """Registers the bundled model under all names."""
    for name in NAMES:
        subprocess.run(["kvasir", "pull", "path/to/folder", "--name", name], cwd=folder, env=env_of(folder), check=True)


def env_of(folder: Path) -> dict[str, str]:
    """The environment of the commands. Nothing is downloaded."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("KVASIR_", "XDG_"))},
        "HOME": str(folder),
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}",
        "HF_HUB_OFFLINE": "1",
        "KVASIR_MODELS": str(folder / "models"),
    }


def _trace(kind: str) -> str:
    """A few requests in the format of a published trace."""
    if kind == "azure":
        rows = (f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0000000,{100 + 7 * i},{20 + i % 9}" for i in range(120))
        return "\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows, ""))
    row = {"input_length": 1024, "output_length": 20}
    return "".join(json.dumps({"timestamp": 500 * i, **row, "hash_ids": [0, 1 + i % 3]}) + "\n" for i in range(60))


def _write_weights(folder: Path) -> None:
    """The bundled model as a GGUF file, and two adapters for it."""
    from tests.lora.made import write_gguf, write_peft
    from tests.program.mini import write_mini

    for name in ("model.gguf", "qwen3-0.6b-Q4_K_M.gguf", "weights/mine.gguf"):
        write_mini(folder / name, "Q8_0", tokens=True)
    width, rank = json.loads((MINI / "config.json").read_text())["hidden_size"], 4
    for place in ("loras/sql", "adapters/sql"):
        names = {"lora_A": (rank, width), "lora_B": (width, rank)}
        tensors = {
            f"model.layers.0.self_attn.q_proj.{name}.weight": np.full(shape, 0.01, np.float32)
            for name, shape in names.items()
        }
        write_peft(folder / place, tensors)
    a, b = np.full((rank, width), 0.01, np.float32), np.full((width, rank), 0.01, np.float32)
    write_gguf(
        folder / "loras/math.gguf", {"blk.0.attn_q.weight.lora_a": a, "blk.0.attn_q.weight.lora_b": b}, 8.0, "llama"
    )


def _write_certificate(folder: Path) -> None:
    """server.key and server.crt, and both in one file."""
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    files = ["-keyout", "server.key", "-out", "server.crt", "-addext", names]
    subprocess.run([*command.split(), *files], cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "server.crt").read_text() + (folder / "server.key").read_text())
    (folder / "both.pem").chmod(0o600)
