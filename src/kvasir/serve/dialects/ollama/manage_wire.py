"""The request bodies of Ollama's API for listing and managing models. `name` is the older spelling of `model`.
Specification: https://docs.ollama.com/api"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from kvasir.errors import InvalidRequest
from kvasir.serve.dialects.ollama.wire import OllamaMessage
from kvasir.serve.http.wire import MAX_MESSAGES, Name, Refused, TextOrList, Wire

_MAX_FILES = 1024
_ELSEWHERE = "models always run on this server"
Files = Annotated[dict[str, str], Field(max_length=_MAX_FILES)]


class Naming(Wire):
    model: Name | None = None
    name: Name | None = None

    @property
    def named(self) -> str:
        """The model's name. Raises InvalidRequest if it is missing."""
        found = self.model or self.name
        if not found:
            raise InvalidRequest("the model is missing", "name one", param="model")
        return found


class ShowRequest(Naming):
    """POST /api/show. verbose: also return long lists."""

    REFUSED: ClassVar[Refused] = {
        "system": (("",), "it shows what is stored"),
        "template": (("",), "it shows what is stored"),
        "options": (({},), "it shows what is stored"),
    }

    verbose: bool | None = None
    system: str | None = None
    template: str | None = None
    options: dict[str, Any] | None = None


class DeleteRequest(Naming):
    """DELETE /api/delete"""


class CopyRequest(Wire):
    """POST /api/copy"""

    source: Name
    destination: Name


class PullRequest(Naming):
    """POST /api/pull"""

    REFUSED: ClassVar[Refused] = {"insecure": ((False,), "downloads are always over TLS")}
    IGNORED: ClassVar = ("username", "password")

    insecure: bool | None = None
    username: str | None = None
    password: str | None = None
    stream: bool | None = None


class PushRequest(PullRequest):
    """POST /api/push"""


class CreateRequest(Naming):
    """POST /api/create. files: file name -> digest ("sha256:...") of an uploaded blob. draft_files: of the model that
    drafts; draft: such a model by name. draft_quantize: as quantize, or none. adapters: the files of an adapter, as
    `files`, that applies to all requests."""

    REFUSED: ClassVar[Refused] = {
        "renderer": (("",), "write the format as a Jinja template"),
        "parser": (("",), "`kvasir serve --tool-format` and `--reasoning-format` select the formats"),
        "info": (({},), "it is read from the weights"),
        "remote_host": (("",), _ELSEWHERE),
        "path": (("",), "send the fields of the Modelfile"),
        "modelfile": (("",), "send the fields of the Modelfile"),
    }

    from_: Annotated[str | None, Field(alias="from")] = None
    files: Files | None = None
    adapters: Files | None = None
    template: str | None = None
    system: str | None = None
    license: TextOrList | None = None
    parameters: Annotated[dict[str, Any], Field(max_length=64)] | None = None
    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] | None = None
    quantize: str | None = None
    quantization: str | None = None
    requires: str | None = None
    renderer: str | None = None
    parser: str | None = None
    draft: str | None = None
    draft_files: Files | None = None
    draft_quantize: str | None = None
    info: dict[str, Any] | None = None
    remote_host: str | None = None
    path: str | None = None
    modelfile: str | None = None
    stream: bool | None = None
