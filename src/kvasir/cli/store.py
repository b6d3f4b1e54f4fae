"""The commands of the model store: pull, create, list, show, cp and rm; ps and stop send requests to a running
server."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from kvasir.cli.show import bytes_text, plain, print_json, print_pairs, print_table
from kvasir.errors import InvalidRequest, KvasirError
from kvasir.store.entry import ModelEntry
from kvasir.store.files import Stopped
from kvasir.store.modelfile import MAX_CHARS, Modelfile, parse_modelfile, write_modelfile
from kvasir.store.progress import PullProgress, Report
from kvasir.store.short_names import expand, known
from kvasir.store.store import ModelStore

_ID_DIGITS = 12
_ANSWER_SECONDS = 60.0
_MAX_ANSWER = 16 << 20


def store() -> ModelStore:
    """The user's own store: it accepts any path that the user may read."""
    return ModelStore(any_path=True)


def pull(ref: str, name: str | None) -> None:
    _changed(lambda report, stop: store().pull(ref, name, report, stop))


def create(name: str, file: Path, quantize: str | None, draft_quantize: str | None) -> None:
    text = _read_modelfile(file)
    recipe = replace(parse_modelfile(text), quantize=quantize, draft_quantize=draft_quantize)
    base = Path.cwd() if str(file) == "-" else file.parent.absolute()
    _changed(lambda report, stop: store().create(name, recipe, base=base, report=report, stop=stop))


def _read_modelfile(file: Path) -> str:
    """The text of the file, or of standard input for "-". Raises InvalidRequest if it cannot be read."""
    try:
        if str(file) == "-":
            return sys.stdin.read(MAX_CHARS + 1)
        with file.open(encoding="utf-8") as text:
            return text.read(MAX_CHARS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise InvalidRequest(f"{file}: {reason}", "name a Modelfile, or - for standard input") from error


def list_models(as_json: bool) -> None:
    entries = store().list()
    if as_json:
        return print_json([_as_json(entry) for entry in entries])
    if not entries:
        return print("the store is empty; to fill it: kvasir pull qwen3:0.6b (kvasir-mini is always there)")
    rows = [(e.name, e.digest[:_ID_DIGITS], bytes_text(e.weights.size), _kind(e), _ago(e.modified)) for e in entries]
    print_table(("name", "id", ">size", "weights", "modified"), rows)


def list_names(as_json: bool) -> None:
    """Prints all short names with the repositories or places that they lead to. Raises ConfigError."""
    places = {name: expand(name) for name in known()}
    if as_json:
        return print_json(places)
    print_table(("name", "place"), places.items())


def _kind(entry: ModelEntry) -> str:
    """The type of its weights, and what an adapter adds to them."""
    count = len(entry.adapters)
    more = " adapter" if entry.is_adapter else f" + {count} adapter{'s' * (count > 1)}" if count else ""
    return entry.details.quantization_level + more


def show(name: str, modelfile: bool, as_json: bool) -> None:
    entry = store().get(name)
    if modelfile:
        return print(write_modelfile(recipe_of(entry)), end="")
    if as_json:
        return print_json(_as_json(entry))
    details, weights = entry.details, entry.weights
    print_pairs(
        (
            ("name", entry.name),
            ("id", entry.digest[:_ID_DIGITS]),
            ("made from", entry.parent or weights.source or "-"),
            ("weights", f"{weights.path}, {weights.format}, {bytes_text(weights.size)}"),
            ("model", f"{details.family}, {details.parameter_size}, {details.quantization_level}"),
            ("context", f"{details.context_length or '?'} tokens"),
            ("can", ", ".join(details.capabilities) or "-"),
            ("parameters", ", ".join(f"{key}={value}" for key, value in entry.parameters.items()) or "-"),
            ("system", entry.system or "-"),
            ("messages", len(entry.messages)),
            ("template", "its own" if entry.template else "as the weights" if details.template else "none"),
            ("quantize", entry.quantize or "-"),
            ("drafter", _drafter(entry)),
            ("adapters", "; ".join(f"{one.path}, {bytes_text(one.size)}" for one in entry.adapters) or "-"),
            ("licence", "; ".join(text.splitlines()[0] for text in entry.license if text) or "-"),
            ("modified", datetime.fromtimestamp(entry.modified).isoformat(" ", "seconds")),
        )
    )


def recipe_of(entry: ModelEntry) -> Modelfile:
    """The recipe that would create the same model again."""
    own = (entry.parameters, entry.template, entry.system, entry.messages, entry.license, entry.requires)
    paths = tuple(weights.path for weights in entry.adapters)
    return Modelfile((entry.weights.path,), *own, draft=entry.draft and entry.draft.weights.path, adapters=paths)


def _drafter(entry: ModelEntry) -> str:
    draft = entry.draft
    if draft is None:
        return "-"
    quantize = f", quantize {draft.quantize}" if draft.quantize else ""
    facts = f"{draft.details.family}, {draft.details.parameter_size}, {draft.details.quantization_level}{quantize}"
    return f"{draft.weights.path}, {bytes_text(draft.weights.size)}, {facts}"


def copy(source: str, target: str) -> None:
    print(f"{store().copy(source, target).name} is in the store")


def remove(names: list[str]) -> None:
    for name in names:
        removed = store().remove(name)
        parts = (("of weights", removed.weights), ("of packed weights", removed.packed))
        freed = " and ".join(f"{bytes_text(count)} {what}" for what, count in parts if count)
        print(f"{removed.name} was removed{f', with {freed}' if freed else ''}")


def _as_json(entry: ModelEntry) -> dict[str, Any]:
    return {**msgspec.to_builtins(entry), "digest": entry.digest}


def _ago(then: float) -> str:
    """The time since `then` (seconds since 1970), in the largest whole unit."""
    seconds = max(0.0, time.time() - then)
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' * (count > 1)} ago"
    return "just now"


# -- progress ------------------------------------------------------------------------------------------------


def _changed(change: Callable[[Report, Event], ModelEntry]) -> None:
    """Runs a long change with a bar for each file, or with a line for each status if there is no terminal. Ctrl-C stops
    it."""
    stop = Event()
    shown: AbstractContextManager[Report] = _Bars() if sys.stderr.isatty() else nullcontext(_Lines())
    try:
        with shown as report:
            entry = change(report, stop)
    except KeyboardInterrupt:
        raise Stopped from None
    print(f"{entry.name} is in the store: {entry.details.family}, {bytes_text(entry.weights.size)}")


class _Lines:
    def __init__(self) -> None:
        self._last = ""

    def __call__(self, progress: PullProgress) -> None:
        if progress.status != self._last:
            self._last = progress.status
            print(progress.status, file=sys.stderr)


class _Bars:
    """A line for each status, with a bar if bytes are counted."""

    def __enter__(self) -> Report:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bars

        columns = (
            *(TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn()),
            *(TransferSpeedColumn(), TimeRemainingColumn()),
        )
        self._bars = Bars(*columns, console=Console(stderr=True))
        self._tasks: dict[str, Any] = {}
        self._bars.start()
        return self._report

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _report(self, progress: PullProgress) -> None:
        if not progress.total:
            return self._bars.console.print(progress.status, markup=False)
        task = self._tasks.get(progress.status)
        if task is None:
            task = self._tasks[progress.status] = self._bars.add_task(progress.status, total=progress.total)
        self._bars.update(task, completed=progress.completed)


# -- a running server ----------------------------------------------------------------------------------------


def ps(url: str, key: str | None, as_json: bool) -> None:
    models = ask(url, key, "GET", "/api/ps").get("models", [])
    if as_json:
        return print_json(models)
    rows = [(m["name"], bytes_text(m["size"]), m["context_length"], _until(m["expires_at"])) for m in models]
    print_table(("name", ">size", ">context", "until"), rows)


def _until(expires: str) -> str:
    left = datetime.fromisoformat(expires).timestamp() - time.time()
    return "forever" if left > 10 * 365 * 86400 else f"{max(0.0, left):.0f} s from now"


def stop(name: str, url: str, key: str | None) -> None:
    ask(url, key, "POST", "/api/generate", {"model": name, "keep_alive": 0})
    print(f"{name} unloads when its running requests end")


def ask(
    url: str, key: str | None, method: str, path: str, body: dict | None = None, seconds: float = _ANSWER_SECONDS
) -> Any:
    """The JSON in the server's response, which may take `seconds`. Raises KvasirError with the server's message."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        request = Request(url.rstrip("/") + path, data, headers, method=method)
        with build_opener(ProxyHandler({})).open(request, timeout=seconds) as response:
            return json.loads(response.read(_MAX_ANSWER))
    except HTTPError as error:
        hint = "give one with --api-key" if error.code == 401 else ""
        raise KvasirError(f"{url} returned {error.code}: {_error_text(error.read(_MAX_ANSWER))}", hint) from error
    except (URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise KvasirError(f"{url}: {reason}", "is `kvasir serve` running there? set its address with --url") from error


def _error_text(body: bytes) -> str:
    """The message of an error in OpenAI's or Ollama's form, or the body."""
    try:
        error = json.loads(body)["error"]
        return plain(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, KeyError, TypeError):
        return plain(body[:200].decode(errors="replace"))
