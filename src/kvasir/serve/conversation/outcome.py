"""How a choice ended, as an error if it did not end by itself."""

from __future__ import annotations

from kvasir.engine.answer import Answer, TextDelta
from kvasir.errors import DeadlineExceeded, InvalidRequest, RequestAborted
from kvasir.serve.http.faults import AnswerFailed, ids_for_logs, log
from kvasir.types import FinishReason


def check_finish(answer: TextDelta | Answer, request_id: str) -> None:
    """Raises an error for a choice that did not end by itself: InvalidRequest if the request is the cause, AnswerFailed
    if the engine is (the details are only logged), DeadlineExceeded after a timeout, RequestAborted."""
    reason = answer.finish_reason
    if reason is FinishReason.ERROR and answer.refused:
        raise InvalidRequest(answer.error or "the request was refused")
    if reason is FinishReason.ERROR:
        log.error("request %s failed in the engine: %s%s", request_id, answer.error, ids_for_logs())
        raise AnswerFailed(f"the engine failed on request {request_id}", "see the server's log")
    if reason is FinishReason.TIMEOUT:
        raise DeadlineExceeded("the deadline of the request passed", "the text streamed so far is valid")
    if reason is FinishReason.ABORT:
        raise RequestAborted("the request was aborted")
