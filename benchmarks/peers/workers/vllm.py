"""vLLM's CPU build: its LLM object, stepped by hand so that each token's time is known."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import time
from typing import Any

from benchmarks.peers.workers.protocol import Timeline, serve


class Vllm:
    def load(self, model: str, max_model_len: int, max_num_seqs: int, **_: Any) -> dict[str, Any]:
        import vllm

        self._llm = vllm.LLM(
            model, dtype="bfloat16", max_model_len=max_model_len, max_num_seqs=max_num_seqs,
            enable_prefix_caching=False, disable_log_stats=True,
        )  # fmt: skip
        self._number = 0
        return {"version": vllm.__version__, "flags": "dtype=bfloat16, no prefix caching, otherwise defaults"}

    def answer(self, prompts: list[list[int]], new: int) -> dict[str, float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        engine, line = self._llm.llm_engine, Timeline(len(prompts), new)
        users = {}
        begun = time.perf_counter()
        for user, ids in enumerate(prompts):
            self._number += 1
            users[str(self._number)] = user
            engine.add_request(str(self._number), {"prompt_token_ids": ids}, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter() - begun
            for output in outputs:
                line.add(now, users[output.request_id.split("-")[0]], len(output.outputs[0].token_ids))
        return line.figures()


if __name__ == "__main__":
    serve(Vllm())
