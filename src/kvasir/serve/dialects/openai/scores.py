"""POST /rerank, /v1/rerank and /v2/rerank (Cohere's and Jina's bodies), and /score and /v1/score (vLLM's)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from kvasir.engine.scoring import Comparison, Pair, Reading, compare, pairs_of, ranked
from kvasir.errors import InvalidRequest
from kvasir.serve.conversation.scheduling import Scheduling, scheduling_fields
from kvasir.serve.dialects.openai.pooled import check_count, listed, response_id, results_of, usage_of
from kvasir.serve.hosting.catalogue import serving_of
from kvasir.serve.hosting.serving import Serving
from kvasir.serve.http.body import JsonRoute
from kvasir.serve.http.responses import write_json
from kvasir.serve.http.wire import LEAVE_OUT, Name, Refused, TextOrList, Wire, refuse_fields

router = APIRouter(route_class=JsonRoute)


class Document(Wire):
    text: str


class Comparing(Scheduling):
    """Fields of all routes that compare texts. truncate_prompt_tokens: most tokens of a pair, -1 for as many as the
    context has; further ones of its second text are cut off. use_activation: false for logits."""

    REFUSED: ClassVar[Refused] = {
        "activation": ((True,), "use use_activation"),
        "softmax": ((True,), "use use_activation"),
    }
    IGNORED: ClassVar = ("user",)

    model: Name | None = None
    instruction: str | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    use_activation: bool | None = None
    user: Name | None = None

    activation: Any = None
    softmax: Any = None


class RerankRequest(Comparing):
    """POST /rerank. max_tokens_per_doc: further tokens of a document are cut off. return_documents: whether results
    hold the documents' texts; without it they do, except in Cohere's second version."""

    REFUSED: ClassVar[Refused] = {
        **Comparing.REFUSED,
        "max_chunks_per_doc": ((), "use max_tokens_per_doc"),
        "rank_fields": ((["text"],), LEAVE_OUT),
    }

    query: str
    documents: list[str | Document]
    top_n: Annotated[int, Field(ge=0)] | None = None
    max_tokens_per_doc: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    return_documents: bool | None = None

    max_chunks_per_doc: Any = None
    rank_fields: Any = None


class ScoreRequest(Comparing):
    """POST /score: one first text with each second text, or as many with as many. The fields of either pair of
    names."""

    encoding_format: Literal["float"] | None = None
    text_1: TextOrList = None
    text_2: TextOrList = None
    queries: TextOrList = None
    documents: TextOrList = None


@router.post("/rerank", tags=["openai"])
@router.post("/v1/rerank", tags=["openai"])
@router.post("/v2/rerank", tags=["openai"])
async def rerank(wire: RerankRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    refuse_fields(wire)
    texts = [one if isinstance(one, str) else one.text for one in wire.documents]
    check_count(serving, len(texts), "documents")
    pairs = [(wire.query, text) for text in texts]
    comparison, scores = await _compared(wire, pairs, serving, request, wire.max_tokens_per_doc or 0)
    best = ranked(scores)[: wire.top_n or len(scores)]
    with_text = wire.return_documents
    if with_text is None:
        with_text = not request.url.path.startswith("/v2/")

    def answer() -> dict[str, Any]:
        return {
            "id": response_id("rerank", request),
            "model": serving.names[0],
            "usage": usage_of(comparison.prompt_tokens),
            "results": [
                {"index": i, "relevance_score": score, **({"document": {"text": texts[i]}} if with_text else {})}
                for i, score in best
            ],
            **({"truncated": list(comparison.cut)} if comparison.cut else {}),
        }

    return await write_json(len(texts) > 256, answer)


@router.post("/score", tags=["openai"])
@router.post("/v1/score", tags=["openai"])
async def score(wire: ScoreRequest, request: HTTPRequest) -> Response:
    serving = await serving_of(request, wire.model)
    refuse_fields(wire)
    pairs = pairs_of(*_sides(wire))
    check_count(serving, len(pairs), "text_2" if wire.text_2 is not None else "documents")
    comparison, scores = await _compared(wire, pairs, serving, request)

    def answer() -> dict[str, Any]:
        data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
        cut = {"truncated": list(comparison.cut)} if comparison.cut else {}
        return {**listed("score", data, comparison.prompt_tokens, serving, request), **cut}

    return await write_json(len(pairs) > 256, answer)


def _sides(wire: ScoreRequest) -> tuple[Any, Any]:
    """The first and the second texts. Raises InvalidRequest unless one pair of fields is given."""
    both = [("text_1", "text_2"), ("queries", "documents")]
    given = [names for names in both if any(getattr(wire, name) is not None for name in names)]
    if len(given) != 1 or any(getattr(wire, name) is None for name in given[0]):
        raise InvalidRequest("expected text_1 and text_2, or queries and documents", param="text_1")
    return getattr(wire, given[0][0]), getattr(wire, given[0][1])


async def _compared(
    wire: Comparing, pairs: Sequence[Pair], serving: Serving, request: HTTPRequest, second_tokens: int = 0
) -> tuple[Comparison, list[float]]:
    front, most = serving.front, wire.truncate_prompt_tokens or 0
    reading = Reading(
        instruction=wire.instruction or "",
        tokens=front.info.max_model_len if most == -1 else most,
        second_tokens=second_tokens,
        raw=wire.use_activation is False,
    )
    comparison = await compare(front, pairs, reading, **scheduling_fields(wire, serving, request))
    return comparison, comparison.scores(await results_of(comparison.requests, serving, request))
