"""The response objects of Text Generation Inference."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from kvasir.engine.answer import Answer, Candidate, TextDelta, TokenInfo
from kvasir.serve.conversation.logprobs import finite
from kvasir.serve.conversation.outcome import check_finish
from kvasir.types import FinishReason, Request


def generated(answers: Sequence[Answer], core: Request, prefix: str, details: bool, special: Collection[int]) -> dict:
    """The response: the first choice, and the others as `best_of_sequences`. prefix: text to put before each. special:
    the ids of special tokens."""
    for answer in answers:
        check_finish(answer, core.id)
    best, *others = answers
    if not details:
        return {"generated_text": prefix + best.text}
    found = _details(best, core, special)
    if others:
        sequences = [{"generated_text": prefix + a.text, **_details(a, core, special)} for a in others]
        found["best_of_sequences"] = sequences
    return {"generated_text": prefix + best.text, "details": found}


def _details(answer: Answer, core: Request, special: Collection[int]) -> dict[str, Any]:
    found = {
        **_ending(answer, core),
        "prefill": [{"id": i.token, "text": i.text, "logprob": i.logprob} for i in answer.prompt_logprobs or ()],
        "tokens": [_token(info, info.text, special) for info in answer.logprobs],
    }
    if core.params.logprobs:
        found["top_tokens"] = [_top(info, special) for info in answer.logprobs]
    return found


def _ending(answer: Answer | TextDelta, core: Request) -> dict[str, Any]:
    reason = "length"
    if answer.finish_reason is FinishReason.STOP:
        reason = "eos_token" if answer.stop_reason is None else "stop_sequence"
    seed = None if core.params.greedy else core.params.seed
    return {"finish_reason": reason, "generated_tokens": answer.usage.completion_tokens, "seed": seed}


def _token(token: TokenInfo | Candidate, text: str, special: Collection[int]) -> dict[str, Any]:
    return {"id": token.token, "text": text, "logprob": finite(token.logprob), "special": token.token in special}


def _top(info: TokenInfo, special: Collection[int]) -> list[dict[str, Any]]:
    return [_token(candidate, candidate.text, special) for candidate in info.top]


class TokenStream:
    """The stream objects of one choice: one per token. The texts of the tokens that are not special, joined, are the
    generated text."""

    def __init__(self, core: Request, prefix: str, special: Collection[int]):
        self._core, self._prefix, self._special = core, prefix, special
        self._text = ""  # of the choice so far
        self._sent = 0  # characters of it that belong to tokens already sent
        self._index = 0
        self._last: TokenInfo | None = None

    def push(self, delta: TextDelta) -> Iterator[dict[str, Any]]:
        check_finish(delta, self._core.id)
        self._text += delta.text
        infos = list(delta.logprobs)
        if not infos and delta.finish_reason and self._last:
            infos = [self._last]  # its text was held back
        if not infos:
            return
        for info, end in zip(infos, self._ends(infos), strict=True):
            text = info.text if info.token in self._special else self._text[self._sent : end]
            self._sent = max(self._sent, end)
            self._index += 1
            found = {"index": self._index, "token": _token(info, text, self._special)}
            if self._core.params.logprobs:
                found["top_tokens"] = _top(info, self._special)
            yield found | self._end(delta if info is infos[-1] else None)
        self._last = infos[-1]

    def _ends(self, infos: Sequence[TokenInfo]) -> Iterable[int]:
        """The position where the text of each token ends: where the next one begins, or the end of the delta."""
        begins = [min(info.offset, len(self._text)) for info in infos[1:]]
        plain = [i for i, info in enumerate(infos) if info.token not in self._special]
        last = plain[-1] if plain else -1
        return [len(self._text) if i == last else end for i, end in enumerate([*begins, len(self._text)])]

    def _end(self, delta: TextDelta | None) -> dict[str, Any]:
        if delta is None or not delta.finish_reason:
            return {"generated_text": None, "details": None}
        ending = _ending(delta, self._core) | {"input_length": len(self._core.prompt_ids)}
        return {"generated_text": self._prefix + self._text, "details": ending}
