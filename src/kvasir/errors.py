"""Errors a user can act on: what was wrong, what was expected, what to do."""


class KvasirError(Exception):
    """Base of all errors meant for users. `hint` says what to do next."""

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InvalidRequest(KvasirError, ValueError):
    """A request that cannot be served as asked: HTTP 400. `param` names the offending field."""

    def __init__(self, message: str, hint: str = "", param: str | None = None):
        super().__init__(message, hint)
        self.param = param


class ModelNotFound(InvalidRequest):
    """A request names a model that there is not: HTTP 404."""


class QueueFull(KvasirError):
    """The waiting queue is at its bound: HTTP 429 with `Retry-After: retry_after` seconds."""

    def __init__(self, message: str, hint: str = "", retry_after: float = 1.0):
        super().__init__(message, hint)
        self.retry_after = retry_after


class LimitExceeded(KvasirError):
    """A key is at one of its limits: HTTP 429; `retry_after` in seconds, None when waiting would not help."""

    def __init__(self, message: str, hint: str = "", retry_after: float | None = None):
        super().__init__(message, hint)
        self.retry_after = retry_after


class DeadlineExceeded(KvasirError):
    """The request's own deadline passed before its answer was complete: HTTP 408."""


class ModelFileError(KvasirError, ValueError):
    """A model file is malformed, truncated, hostile, or of a kind that cannot be read."""


class UnsupportedModel(KvasirError, ValueError):
    """An architecture, tokenizer or feature of a model that this engine does not have."""


class TemplateError(InvalidRequest):
    """A chat template refused the conversation, failed, or exceeded its time or output limit."""


class ConfigError(KvasirError, ValueError):
    """An option has a value that cannot work on this machine or with this model."""


class EngineDead(KvasirError):
    """The engine process ended while this request ran and it could not be resumed: HTTP 503."""
