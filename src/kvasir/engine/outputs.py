"""What LLM and AsyncLLM return: the outputs of requests, with the names that users know from vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvasir.engine.answer import Answer, TokenInfo
from kvasir.errors import InvalidRequest, KvasirError
from kvasir.types import FinishReason, Request


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability, from the raw logits; rank 1 is the most probable."""

    logprob: float
    rank: int
    decoded_token: str


Logprobs = list[dict[int, Logprob]]


@dataclass
class CompletionOutput:
    """One choice. `logprobs`: if requested, one dict per token, with the sampled token's entry first, then the top
    tokens."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | None

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None if they were not requested."""
        if self.logprobs is None:
            return None
        return sum(entry[token].logprob for entry, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass
class RequestOutput:
    """The output for a prompt. `seed` is the request's own: pass it again to get the same choices. Of all tokens that
    were drafted for the choices, the accepted ones are part of them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = True
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


@dataclass
class EmbeddingOutput:
    """The embedding of a prompt: float32 values."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: list[float] = field(repr=False)


@dataclass
class ClassificationOutput:
    """The scores of a classifier's labels for a prompt, in the order of `labels`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    labels: tuple[str, ...]
    probs: list[float]

    @property
    def label(self) -> str:
        """The label with the highest score."""
        return self.labels[max(range(len(self.probs)), key=self.probs.__getitem__)]


@dataclass
class ScoreOutput:
    """The score of a pair of texts: higher if they fit better."""

    texts: tuple[str, str]
    score: float


@dataclass
class TokenEmbeddingOutput:
    """An embedding of each token of a prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embeddings: list[list[float]] = field(repr=False)


@dataclass
class LexicalOutput:
    """The weights of a prompt's tokens for lexical matching, by id."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    weights: dict[int, float]


def raise_fault(answer: Answer) -> None:
    """Raises KvasirError if the engine failed on the request or refused it."""
    if answer.finish_reason is FinishReason.ERROR and answer.refused:
        raise InvalidRequest(answer.error or "the request was refused")
    if answer.finish_reason is FinishReason.ERROR:
        raise KvasirError(f"the engine failed on this request: {answer.error}")


def _entry(token: TokenInfo) -> dict[int, Logprob]:
    assert token.logprob is not None
    own = {token.token: Logprob(token.logprob, token.rank, token.text)}
    best = {c.token: Logprob(c.logprob, i, c.text) for i, c in enumerate(token.top, 1)}
    return own | {t: entry for t, entry in best.items() if t not in own}


def output_of(request: Request, text: str | None, answers: list[Answer]) -> RequestOutput:
    """The output of a request, as far as its answers are known."""
    wants = request.params.logprobs is not None
    outputs = [
        CompletionOutput(
            a.index, a.text, list(a.token_ids), [_entry(t) for t in a.logprobs] if wants else None,
            a.finish_reason.value if a.finish_reason else None, a.stop_reason,
        )
        for a in answers
    ]  # fmt: skip
    prompt_logprobs = answers[0].prompt_logprobs
    return RequestOutput(
        request.id,
        text,
        list(request.prompt_ids),
        outputs,
        request.params.seed or 0,
        [None if t.logprob is None else _entry(t) for t in prompt_logprobs] if prompt_logprobs else None,
        all(a.finish_reason for a in answers),
        sum(a.usage.accepted_tokens for a in answers),
        sum(a.usage.rejected_tokens for a in answers),
    )
