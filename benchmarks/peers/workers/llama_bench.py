"""llama.cpp's llama-batched-bench, run once per command. It makes its own random prompts and does not sample."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from benchmarks.peers.workers.protocol import serve

TRIES = 20  # a thread writes its log, and may lose the last lines of a short run


class LlamaBench:
    def load(self, model: str, threads: int, **_: Any) -> dict[str, Any]:
        self._program = os.path.join(os.environ["LLAMA_BIN"], "llama-batched-bench")
        self._command = [self._program, "-m", model, "-t", str(threads), "-tb", str(threads)]
        self._command += ["-b", "2048", "-ub", "512", "--output-format", "jsonl"]
        version = subprocess.run([self._program, "--version"], capture_output=True, text=True)
        return {
            "version": " ".join((version.stdout + version.stderr).split()[:6]),
            "flags": " ".join(self._command[3:]),
        }

    def answer(
        self, prompts: list[list[int]], new: int, flash_attn: bool | None = None, kv_unified: bool = False
    ) -> dict[str, float]:
        users, length = len(prompts), len(prompts[0])
        shape = ["-npp", length, "-ntg", new, "-npl", users, "-c", users * (length + new + 64)]
        flags = [] if flash_attn is None else ["-fa", "on" if flash_attn else "off"]
        flags += ["-kvu"] if kv_unified else []
        command = [*self._command, *map(str, shape), *flags]
        for _ in range(TRIES):
            ran = subprocess.run(command, capture_output=True, text=True)
            if ran.returncode:
                raise RuntimeError(f"{' '.join(command)}: {ran.stderr[-500:]}")
            if found := figures(ran.stdout + ran.stderr, users, new):
                return found
        raise RuntimeError(f"{' '.join(command)} printed no result")


def figures(output: str, users: int, new: int) -> dict[str, float]:
    """The figures from the result line; empty if there is none."""
    for line in output.splitlines():
        if line.startswith("{") and '"speed_tg"' in line:
            row = json.loads(line)
            return {
                "first_s": row["t_pp"], "decode_tokens": users * new, "decode_s": row["t_tg"],
                "total_s": row["t_pp"] + row["t_tg"],
            }  # fmt: skip
    return {}


if __name__ == "__main__":
    serve(LlamaBench())
