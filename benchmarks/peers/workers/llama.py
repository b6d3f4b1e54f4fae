"""llama.cpp through the low-level interface of llama-cpp-python, used in the same way as by llama-batched-bench.

The next token is numpy's argmax over the logits, which is faster than llama.cpp's own greedy sampler.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp as api
import numpy as np

from benchmarks.peers.workers.protocol import in_step, serve

BATCH = 2048  # tokens in a call; llama.cpp splits them into batches of 512
SPARE = 64  # cells beyond those that a sequence needs: llama.cpp rounds up
_AUTO = -1


class Llama:
    def load(self, model: str, threads: int, **_: Any) -> dict[str, Any]:
        self._quiet = api.llama_log_callback(lambda level, text, data: None)
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        self._model = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
        if not self._model:
            raise ValueError(f"llama.cpp cannot load {model}")
        self._threads = threads
        self._vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._context: Any = None
        self._shape: tuple = ()
        self._held: list[list[int]] = []
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        self._views()
        return {"version": api.__version__, "flags": api.llama_print_system_info().decode()}

    def answer(
        self, prompts: list[list[int]], new: int, flash_attn: bool | None = None, kv_unified: bool = False
    ) -> dict[str, float]:
        """The same prompts in a context of the same shape are not computed again: then first_s has no meaning."""
        users, length = len(prompts), len(prompts[0])
        kept = self._open(users, length + new, flash_attn, kv_unified) and prompts == self._held
        begun = time.perf_counter()
        tokens = self._read_again(prompts) if kept else self._read(prompts)
        first = time.perf_counter() - begun
        self._held = prompts
        steps = []
        for position in range(length, length + new - 1):
            begun = time.perf_counter()
            tokens = self._step(tokens, position)
            steps.append(time.perf_counter() - begun)
        return in_step(first, steps, users)

    def embed(self, prompts: list[list[int]], together: int = 1, flash_attn: bool | None = None) -> dict[str, float]:
        """together: the number of texts in a batch, which is also the size of llama.cpp's own batches."""
        self._open_encoder(together, len(prompts[0]), flash_attn)
        begun = time.perf_counter()
        for start in range(0, len(prompts), together):
            self._encode(prompts[start : start + together])
        return {"total_s": time.perf_counter() - begun}

    def best(self, prompt: list[int], count: int) -> dict[str, Any]:
        """The most likely next tokens with their log-probabilities, or the embedding if `count` is 0."""
        if not count:
            self._open_encoder(1, len(prompt), None)
            return {"embedding": self._encode([prompt])[0].tolist()}
        self._open(1, len(prompt) + 1, None, False)
        self._held = []
        self._read([prompt])
        logits = np.ctypeslib.as_array(api.llama_get_logits(self._context), (self._vocab,)).astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        return {"logprobs": {str(i): float(logprobs[i]) for i in np.argsort(-logprobs)[:count]}}

    def _encode(self, texts: list[list[int]]) -> list[np.ndarray]:
        """The embeddings, normalised as llama.cpp's own program does after the computation."""
        batch, place = self._texts, 0
        for number, ids in enumerate(texts):
            for position, token in enumerate(ids):
                batch.token[place], batch.pos[place], batch.n_seq_id[place] = token, position, 1
                batch.seq_id[place][0], batch.logits[place] = number, 1
                place += 1
        batch.n_tokens = place
        if status := api.llama_encode(self._context, batch):
            raise RuntimeError(f"llama_encode returned {status}")
        width = api.llama_model_n_embd(self._model)
        found = (api.llama_get_embeddings_seq(self._context, i) for i in range(len(texts)))
        rows = [np.ctypeslib.as_array(row, (width,)) for row in found]
        return [row / np.linalg.norm(row) for row in rows]

    # -- batches: `logits` marks the tokens whose logits are needed ------------------------------------------------

    def _views(self) -> None:
        batch = self._batch
        for i in range(BATCH):
            batch.n_seq_id[i] = 1
        self._token = np.ctypeslib.as_array(batch.token, (BATCH,))
        self._position = np.ctypeslib.as_array(batch.pos, (BATCH,))
        self._wanted = np.ctypeslib.as_array(batch.logits, (BATCH,))

    def _read(self, prompts: list[list[int]]) -> np.ndarray:
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        return self._run([(u, p, ids[p], p == len(ids) - 1) for u, ids in enumerate(prompts) for p in range(len(ids))])

    def _read_again(self, prompts: list[list[int]]) -> np.ndarray:
        """Removes the generated tokens and the prompts' last tokens, and computes only the latter."""
        last, memory = len(prompts[0]) - 1, api.llama_get_memory(self._context)
        for user in range(len(prompts)):
            api.llama_memory_seq_rm(memory, user, last, -1)
        return self._run([(user, last, ids[last], True) for user, ids in enumerate(prompts)])

    def _run(self, entries: list[tuple[int, int, int, bool]]) -> np.ndarray:
        """The next tokens of entries: (user, position, token, whether its logits are needed)."""
        found = []
        for start in range(0, len(entries), BATCH):
            part = entries[start : start + BATCH]
            users, positions, tokens, wanted = zip(*part, strict=True)
            for i, user in enumerate(users):
                self._batch.seq_id[i][0] = user
            count = len(part)
            self._position[:count], self._token[:count], self._wanted[:count] = positions, tokens, wanted
            found.append(self._decode(count, sum(wanted)))
        api.llama_synchronize(self._context)
        tokens = np.concatenate(found)
        for user in range(len(tokens)):  # all later steps have one token of each user
            self._batch.seq_id[user][0] = user
        self._wanted[: len(tokens)] = 1
        return tokens

    def _step(self, tokens: np.ndarray, position: int) -> np.ndarray:
        count = len(tokens)
        self._token[:count] = tokens
        self._position[:count] = position
        return self._decode(count, count)

    def _decode(self, count: int, wanted: int) -> np.ndarray:
        self._batch.n_tokens = count
        if status := api.llama_decode(self._context, self._batch):
            raise RuntimeError(f"llama_decode returned {status}")
        if not wanted:
            return np.empty(0, np.int64)
        logits = np.ctypeslib.as_array(api.llama_get_logits(self._context), (wanted, self._vocab))
        return logits.argmax(axis=1)

    # -- contexts --------------------------------------------------------------------------------------------------

    def _open(self, users: int, length: int, flash_attn: bool | None, kv_unified: bool) -> bool:
        """Replaces the context if its shape differs; returns whether the old one was kept."""
        shape = users, length, flash_attn, kv_unified
        if shape == self._shape:
            return True
        if self._context:
            api.llama_free(self._context)
        params = api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_seq_max = users * (length + SPARE), BATCH, users
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = _AUTO if flash_attn is None else int(flash_attn)
        params.kv_unified = kv_unified
        self._shape, self._held = (), []
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp cannot create a context of {params.n_ctx} tokens")
        self._shape = shape
        self._warm_up()
        return False

    def _open_encoder(self, texts: int, length: int, flash_attn: bool | None) -> None:
        shape = "texts", texts, length, flash_attn
        if shape == self._shape:
            return
        if self._context:
            api.llama_free(self._context)
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = texts * length
        params.n_seq_max, params.embeddings = texts, True
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = _AUTO if flash_attn is None else int(flash_attn)
        self._shape, self._held = (), []
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise ValueError(f"llama.cpp cannot create a context of {params.n_ctx} tokens")
        self._texts = api.llama_batch_init(texts * length, 0, 1)
        self._shape = shape
        self._encode([[0] * length] * texts)

    def _warm_up(self) -> None:
        """The same warm-up as in llama.cpp's programs."""
        self._run([(0, p, p + 3, p == 15) for p in range(16)])
        api.llama_memory_clear(api.llama_get_memory(self._context), True)


if __name__ == "__main__":
    serve(Llama())
