"""The bodies, forms and queries of files and batches.

https://platform.openai.com/docs/api-reference/files and .../batch
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvasir.serve.http.wire import Metadata, Wire

Endpoint = Literal["/v1/responses", "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages"]
Cursor = Annotated[str, Field(max_length=64)]
HOUR, MONTH = 3600, 30 * 86400  # seconds


class OutputExpiresAfter(Wire):
    IGNORED: ClassVar = ("anchor",)  # it has only one value

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=HOUR, le=MONTH)]


class BatchRequest(Wire):
    """POST /v1/batches"""

    completion_window: Literal["24h"]
    endpoint: Endpoint
    input_file_id: Cursor
    metadata: Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None


class BatchLine(Wire):
    """A line of a batch's file."""

    IGNORED: ClassVar = ("method",)  # it has only one value

    custom_id: Annotated[str, Field(min_length=1, max_length=256)]
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class FileForm(BaseModel):
    """The fields of an upload besides the file; all are text."""

    model_config = ConfigDict(extra="forbid")

    purpose: Literal["batch"]
    anchor: Annotated[Literal["created_at"] | None, Field(alias="expires_after[anchor]")] = None
    seconds: Annotated[int | None, Field(ge=HOUR, le=MONTH, alias="expires_after[seconds]")] = None


class Page(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: Cursor | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20


class FilePage(BaseModel):
    model_config = ConfigDict(extra="forbid")

    after: Cursor | None = None
    limit: Annotated[int, Field(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"
    purpose: Annotated[str, Field(max_length=64)] | None = None
