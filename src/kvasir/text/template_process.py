"""Rendering templates in worker processes that can be killed; the parent's side of template_worker.py."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvasir.errors import TemplateError, TemplateLimit, TemplateTooLong
from kvasir.text.rendered import Rendered, TextSpan
from kvasir.text.sandbox import Hold, Sandbox, SandboxLimit

SCRIPT = Path(__file__).with_name("template_worker.py")
WHAT = "chat template"


@dataclass(frozen=True, slots=True)
class TemplateLimits:
    """The limits of one rendering: seconds of processor time, characters of source and of output, bytes of address
    space."""

    seconds: float = 2.0
    max_source: int = 1 << 20
    max_output: int = 2 << 20
    memory: int = 512 << 20


class TemplateRenderer:
    """Thread-safe."""

    def __init__(self, limits: TemplateLimits = TemplateLimits(), max_workers: int = 2):
        self.limits = limits
        self.sandbox = Sandbox(SCRIPT, WHAT, limits.seconds, limits.memory, max_workers)

    def prewarm(self) -> None:
        """Start a worker so that the first rendering does not wait for it."""
        self.sandbox.prewarm()

    def render(
        self,
        source: str,
        variables: Mapping[str, Any],
        now: datetime | None = None,
        own: Mapping[str, Any] | None = None,
        hold: Hold | None = None,
    ) -> Rendered:
        """The text that the template renders from JSON-like variables: `variables`, whose strings come from outside,
        and `own`, the template's. hold: can end the rendering early.

        Raises `TemplateError` with the template's own message if it refuses or fails, the subclass `TemplateLimit` if
        it exceeds a limit (of output: `TemplateTooLong`), and `QueueFull` if no worker becomes free in time.
        """
        if len(source) > self.limits.max_source:
            raise TemplateError(f"the chat template has {len(source)} characters, over {self.limits.max_source}")
        request = {
            "source": source,
            "variables": variables,
            "own": own or {},
            "now": (now or datetime.now()).isoformat(),
            "max_output": self.limits.max_output,
            "seconds": self.limits.seconds,
        }
        try:
            reply = self.sandbox.run(request, hold)
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the conversation is not valid JSON: {error}") from error
        except SandboxLimit as error:
            raise TemplateLimit(error.message) from error
        if "error" in reply:
            raise self._error(reply["kind"], str(reply["error"]))
        return Rendered(reply["text"], tuple(TextSpan(*span) for span in reply["spans"]), source)

    def _error(self, kind: str, message: str) -> TemplateError:
        if kind == "output":
            return TemplateTooLong(self.limits.max_output)
        return TemplateLimit(message) if kind == "limit" else TemplateError(message)

    def close(self) -> None:
        """End the idle workers; a later rendering starts a new worker."""
        self.sandbox.close()
