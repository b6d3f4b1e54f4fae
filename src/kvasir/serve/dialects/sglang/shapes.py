"""The response objects of SGLang's /generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.engine.answer import Answer, Candidate, TokenInfo
from kvasir.errors import RequestAborted
from kvasir.serve.conversation.logprobs import finite
from kvasir.serve.conversation.outcome import check_finish
from kvasir.types import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request. rid: the client's name of it. start: the first prompt token whose log-probability is
    asked for, None for none. scores: log-probabilities are asked for; top: so many candidates for each token; texts:
    with their texts."""

    core: Request
    rid: str
    scores: bool = False
    start: int | None = None
    top: int = 0
    texts: bool = False

    def object(self, answer: Answer, seconds: float) -> dict[str, Any]:
        """A choice, complete or so far. An aborted one is a result like others. seconds: since the request came. Raises
        as `check_finish`."""
        aborted = False
        try:
            check_finish(answer, self.core.id)
        except RequestAborted:
            aborted = True
        meta: dict[str, Any] = {
            "id": self.rid,
            "finish_reason": {"type": "abort", "message": "the request was aborted"} if aborted else self._end(answer),
            "prompt_tokens": len(self.core.prompt_ids),
            "completion_tokens": answer.usage.completion_tokens,
            "cached_tokens": answer.usage.cached_tokens,
            "weight_version": "default",
        }
        if not self.core.params.greedy:
            meta["seed"] = self.core.params.seed
        if self.scores:
            meta |= self._logprobs(answer)
        if answer.finish_reason:
            meta["e2e_latency"] = seconds
        return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}

    def _end(self, answer: Answer) -> dict[str, Any] | None:
        if answer.finish_reason is None:
            return None
        if answer.finish_reason is FinishReason.LENGTH:
            return {"type": "length", "length": answer.usage.completion_tokens}
        matched = answer.stop_reason
        last = answer.token_ids[-1] if answer.token_ids else None
        if matched is None and last in (self.core.eos_ids or ()):
            matched = last
        return {"type": "stop"} if matched is None else {"type": "stop", "matched": matched}

    def _logprobs(self, answer: Answer) -> dict[str, Any]:
        found: dict[str, Any] = {"output_token_logprobs": [self._triple(info) for info in answer.logprobs]}
        if self.top:
            found["output_top_logprobs"] = [self._tops(info) for info in answer.logprobs]
        infos: Sequence[TokenInfo] = ()
        if self.start is not None:
            infos = (answer.prompt_logprobs or ())[self.start :]
        # Before the first one SGLang computes nothing, so it has none for it.
        found["input_token_logprobs"] = [
            (None, *self._triple(info)[1:]) if i == 0 else self._triple(info) for i, info in enumerate(infos)
        ]
        if self.top:
            found["input_top_logprobs"] = [None if i == 0 else self._tops(info) for i, info in enumerate(infos)]
        return found

    def _triple(self, info: TokenInfo | Candidate) -> tuple[float, int, str | None]:
        return finite(info.logprob), info.token, info.text if self.texts else None

    def _tops(self, info: TokenInfo) -> list[tuple[float, int, str | None]]:
        return [self._triple(candidate) for candidate in info.top[: self.top]]
