"""Store: the models of this user, each under a name. Owns its folder:

    manifests/NAME.json    the facts about a model; written after all its other files
    models/FOLDER/         the store's own weights, pulled or uploaded, with their other files
    blobs/sha256-HEX       files uploaded for a future model
    templates/HEX.jinja    templates of models that have their own
    lock                   held while manifests change

Several processes may use one store. All of them see a change at once, since a manifest is replaced atomically.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from kvasir.adapters import AdapterOption
from kvasir.config import EngineOptions
from kvasir.environment import models_dir
from kvasir.errors import InvalidRequest, KvasirError, ModelFileError, ModelNotFound, quoted
from kvasir.speculation import LOOKUPS, QUANTIZED
from kvasir.store.blobs import Blobs, BlobWriter
from kvasir.store.entry import DraftEntry, ModelEntry, Weights
from kvasir.store.facts import read_model_info
from kvasir.store.files import locked, make_folder, remove_folder, try_lock, write_whole
from kvasir.store.manifests import Manifests
from kvasir.store.modelfile import Modelfile
from kvasir.store.names import Name, is_name, parse_name
from kvasir.store.parameters import check_parameters, engine_options_of
from kvasir.store.progress import PullProgress, Report
from kvasir.store.short_names import expand
from kvasir.store.sources import ModelSource, Places, find_source, from_uploads, is_path
from kvasir.store.templates import check_template
from kvasir.weights.find import BUNDLED
from kvasir.weights.local import find_local
from kvasir.weights.packed_names import remove_packed

log = logging.getLogger("kvasir.store")

QUANTIZE = ("q8", "q4")
Source = TypeVar("Source", ModelEntry, ModelSource)
ROLES = ("system", "user", "assistant")

__all__ = ["BlobWriter", "ModelStore", "PullProgress", "Report"]


@dataclass(frozen=True, slots=True)
class Removed:
    """A removed model. weights, packed: bytes of its weights in the store, and of those packed for streaming, that went
    with it."""

    name: str
    weights: int
    packed: int


class ModelStore:
    """All methods may be called from any thread. A method takes long only if its docstring mentions it;
    the others read small files."""

    def __init__(self, root: Path | None = None, allowed_roots: Sequence[Path] = (), any_path: bool = False):
        """allowed_roots: folders under which weights may be named by path. any_path: allows any path, for the user's
        own commands."""
        self.root = (root or models_dir()).absolute()
        self.blobs = Blobs(self.root / "blobs")
        self._models = self.root / "models"
        self._allowed_roots = (*allowed_roots, self._models)
        self._any_path = any_path
        self._templates = self.root / "templates"
        self._manifests = Manifests(self.root / "manifests")

    # -- reading -------------------------------------------------------------------------------------------

    def list(self) -> list[ModelEntry]:
        """All models, most recently modified first."""
        return sorted(self._manifests.all(), key=lambda entry: (-entry.modified, entry.name))

    def get(self, name: str) -> ModelEntry:
        """Raises ModelNotFound, InvalidRequest for a malformed name, ModelFileError for a damaged manifest."""
        entry = self._manifests.read(parse_name(name))
        if entry is None:
            there = ", ".join(entry.name for entry in self.list()[:3]) or "nothing"
            raise ModelNotFound(f"the model {name!r} is not in the store", f"pull it first; available: {there}")
        return entry

    def find(self, name: str) -> ModelEntry | None:
        """Like `get`, but None if there is no such model, its manifest is damaged, or the name is malformed."""
        try:
            return self._manifests.read(parse_name(name)) if is_name(name) else None
        except ModelFileError as error:
            log.warning("%s", error)
            return None

    def options(self, entry: ModelEntry, base: EngineOptions) -> EngineOptions:
        """The options for loading the model: `base`, completed by the entry's settings, such as what drafts for it if
        `base` leaves that open. Raises ModelFileError if weights are gone."""
        for weights in entry.all_weights:
            if not Path(weights.path).exists():
                raise ModelFileError(f"{entry.name}: its weights are no longer at {weights.path}", "pull it again")
        if entry.is_adapter:
            hint = f"name its base model, with --lora NAME={entry.name}"
            raise ModelFileError(f"{entry.name} is an adapter, not a model", hint)
        own: dict[str, Any] = {"model": entry.weights.path}
        own["served_model_name"] = base.served_model_name or entry.name
        if entry.template is not None and base.chat_template is None:
            own["chat_template"] = str(self._template_file(entry.template))
        if entry.quantize and base.quantize is None:
            own["quantize"] = entry.quantize
        if entry.draft and base.speculate == "auto":
            own["speculate"] = ",".join((*LOOKUPS, f"draft={entry.draft.weights.path}"))
            own["draft_quantize"] = base.draft_quantize or entry.draft.quantize
        if entry.adapters:
            own["lora"] = [*(base.lora or ()), *(_always(weights).text for weights in entry.adapters)]
        asked = engine_options_of(entry.parameters)
        return replace(base, **own, **{name: v for name, v in asked.items() if getattr(base, name) is None})

    def model_info(self, entry: ModelEntry, verbose: bool = False) -> dict[str, Any]:
        """The facts in the headers of its files, under GGUF's names. Takes long. Raises ModelFileError."""
        return read_model_info(find_local(Path(entry.weights.path)), verbose)

    # -- changes -------------------------------------------------------------------------------------------

    def pull(
        self, ref: str, name: str | None = None, report: Report | None = None, stop: Event | None = None
    ) -> ModelEntry:
        """Pulls a model (`hf.co/org/repo[:quant]`, `org/repo`, a short name, a path, kvasir-mini) and names it; takes
        long.

        An interrupted pull is resumed. Setting `stop` ends it with Stopped. Raises InvalidRequest, ModelFileError,
        UnsupportedModel.
        """
        report = report or _no_report
        if ref not in BUNDLED and (place := expand(ref)) is not None:
            ref, name = place, name or ref
        wanted = parse_name(name) if name else None
        with self._disk():
            found = find_source([ref], self._places(report, stop))
            entry = ModelEntry(str(_named(wanted, found)), found.weights, found.details, parent=found.base)
            return self._put(entry, report)

    def create(
        self,
        name: str,
        recipe: Modelfile,
        *,
        files: Mapping[str, str] | None = None,
        draft_files: Mapping[str, str] | None = None,
        adapter_files: Mapping[str, str] | None = None,
        base: Path | None = None,
        report: Report | None = None,
        stop: Event | None = None,
    ) -> ModelEntry:
        """Creates a model from another model, the hub, a path, or uploaded files; takes long.

        files: name -> "sha256:HEX" of a blob, in place of the recipe's `from_`; draft_files: in place of its `draft`;
        adapter_files: one adapter besides its `adapters`.
        base: the folder for its relative paths. Raises as `pull`, and ModelNotFound.
        """
        report = report or _no_report
        wanted, changes = parse_name(name), _checked(recipe)
        if recipe.template is not None:
            check_template(recipe.template)
        with self._disk():
            places = self._places(report, stop)
            before = self._from(recipe, files, base, places)
            draft = self._draft(before, recipe, draft_files, base, places)
            adapters = self._adapters(before, recipe, adapter_files, base, places)
        entry = replace(
            before,
            name=str(wanted),
            **changes,
            parameters={**before.parameters, **check_parameters(recipe.parameters)},
            license=tuple(dict.fromkeys((*before.license, *recipe.license))),
            draft=draft,
            adapters=adapters,
            created=0.0,
        )
        with self._disk():
            try:
                _check_context(entry)
                return self._put(entry, report)
            except KvasirError:
                if files or draft_files or adapter_files:  # they stay as blobs for the next attempt
                    with self._locked():
                        self._drop_folder(entry)
                raise

    def copy(self, source: str, target: str) -> ModelEntry:
        """Raises ModelNotFound, InvalidRequest."""
        entry, wanted = self.get(source), parse_name(target)
        with self._disk():
            return self._put(replace(entry, name=str(wanted), created=0.0), _no_report)

    def remove(self, name: str) -> Removed:
        """Also removes the store's own weights, and those packed for streaming, if no other model uses them. Raises
        ModelNotFound, InvalidRequest."""
        with self._disk(), self._locked():
            entry = self.get(name)
            self._manifests.remove(entry.parsed)
            return Removed(entry.name, *self._drop(entry))

    # -- uploads -------------------------------------------------------------------------------------------

    def has_blob(self, digest: str) -> bool:
        """digest: "sha256:HEX". Raises InvalidRequest for another form."""
        return self.blobs.has(digest)

    def receive(self, digest: str) -> BlobWriter:
        """Receives a file that must have this SHA-256. Raises InvalidRequest for a digest in another form."""
        with self._disk():
            make_folder(self.root)
            return self.blobs.receive(digest)

    # -- inside --------------------------------------------------------------------------------------------

    def _places(self, report: Report, stop: Event | None) -> Places:
        return Places(self._models, self._allowed_roots, self._any_path, report, stop)

    def _from(
        self, recipe: Modelfile, files: Mapping[str, str] | None, base: Path | None, places: Places
    ) -> ModelEntry:
        """The entry that a new model starts from: another model with all its settings, or just weights."""
        if files:
            found, parent = from_uploads(files, self.blobs, places), ""
        elif not recipe.from_:
            raise InvalidRequest("no base model is given", "set from or files", param="from")
        else:
            parent = recipe.from_[0]
            known = self.find(parent) if len(recipe.from_) == 1 and not is_path(parent) else None
            if known is not None:
                return replace(_no_adapter(known, parent), parent=known.name)
            found = find_source(recipe.from_, places, base)
        _no_adapter(found, parent)
        return ModelEntry("", found.weights, found.details, parent=parent)

    def _draft(
        self,
        before: ModelEntry,
        recipe: Modelfile,
        files: Mapping[str, str] | None,
        base: Path | None,
        places: Places,
    ) -> DraftEntry | None:
        """What drafts for a new model: as the recipe says, else as for the model it starts from."""
        if not files and recipe.draft is None:
            found = before.draft
        elif files:
            source = from_uploads(files, self.blobs, places)
            found = DraftEntry(source.weights, source.details)
        else:
            assert recipe.draft is not None
            known = None if is_path(recipe.draft) else self.find(recipe.draft)
            source = known or find_source([recipe.draft], places, base)
            found = DraftEntry(source.weights, source.details)
        if found is not None and Path(found.weights.path).resolve() == Path(before.weights.path).resolve():
            raise InvalidRequest("DRAFT names the model itself", "name a smaller one, or a head", param="draft")
        if recipe.draft_quantize is None:
            return found
        if found is None:
            raise InvalidRequest("draft_quantize without a draft", "name what drafts", param="draft_quantize")
        return replace(found, quantize=recipe.draft_quantize)

    def _adapters(
        self,
        before: ModelEntry,
        recipe: Modelfile,
        files: Mapping[str, str] | None,
        base: Path | None,
        places: Places,
    ) -> tuple[Weights, ...]:
        """The adapters of a new model: those of the model it starts from, then its own."""
        found = list(before.adapters)
        for ref in recipe.adapters:
            known = None if is_path(ref) else self.find(ref)
            found.append(_adapter(known or find_source([ref], places, base), ref))
        if files:
            found.append(_adapter(from_uploads(files, self.blobs, places), "adapters"))
        return tuple({weights.digest: weights for weights in found}.values())

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Turns an OSError into KvasirError."""
        try:
            yield
        except OSError as error:
            problem = f"{error.filename or self.root}: {error.strerror or error}"
            raise KvasirError(problem, "check the folder, or set KVASIR_MODELS to another one") from error

    def _locked(self) -> AbstractContextManager[None]:
        make_folder(self.root)
        return locked(self.root / "lock")

    def _put(self, entry: ModelEntry, report: Report) -> ModelEntry:
        """Stores a model under its name, replacing any previous model. Raises ModelFileError if its weights were
        removed meanwhile."""
        report(PullProgress("writing manifest"))
        with self._locked():
            if not all(Path(weights.path).exists() for weights in entry.all_weights):
                raise ModelFileError(f"{entry.name}: its weights were removed meanwhile", "try again")
            before, now = self.find(entry.name), time.time()
            entry = replace(entry, created=before.created if before else now, modified=now)
            self._manifests.write(entry)
            if before is not None:
                self._drop(before)
        report(PullProgress("success"))
        return entry

    def _drop(self, entry: ModelEntry) -> tuple[int, int]:
        """Removes the files of a removed model that no other model uses. Returns the bytes of its weights in the store,
        and of its packed weights."""
        others = list(self._manifests.all())
        if entry.template is not None and all(other.template != entry.template for other in others):
            self._template_path(entry.template).unlink(missing_ok=True)
        used = {digest for other in others for digest in _digests(other)}
        for digest in _digests(entry) - used:
            self.blobs.remove(digest)
        self.blobs.sweep()
        paths = {weights.path for other in others for weights in other.all_weights}
        packed = sum(_drop_packed(weights) for weights in entry.all_weights if weights.path not in paths)
        return self._drop_folder(entry), packed

    def _drop_folder(self, entry: ModelEntry) -> int:
        """Removes the store's folders of the entry's weights if no model uses them. Returns the bytes of weights."""
        freed = 0
        used = {self._folder_of(weights) for other in self._manifests.all() for weights in other.all_weights}
        for folder in {self._folder_of(weights) for weights in entry.all_weights} - used:
            held = try_lock(self._models / f".{folder.name}.lock") if folder else None
            if folder and held is not None:  # otherwise it is being pulled right now
                remove_folder(folder, self._models)
                os.close(held)
                freed += sum(weights.size for weights in entry.all_weights if self._folder_of(weights) == folder)
        return freed

    def _folder_of(self, weights: Weights) -> Path | None:
        """The store's folder that holds these weights; None for weights elsewhere."""
        path = Path(weights.path)
        if not path.is_relative_to(self._models) or ".." in path.parts:
            return None
        inside = path.relative_to(self._models).parts
        return self._models / inside[0] if inside else None

    def _template_path(self, template: str) -> Path:
        return self._templates / f"{hashlib.sha256(template.encode()).hexdigest()}.jinja"

    def _template_file(self, template: str) -> Path:
        path = self._template_path(template)
        if not path.exists():
            make_folder(self._templates)
            write_whole(path, template.encode())
        return path


def _adapter(found: ModelEntry | ModelSource, ref: str) -> Weights:
    """Its weights. Raises InvalidRequest for a model."""
    if not found.is_adapter:
        raise InvalidRequest(f"ADAPTER {quoted(ref)} is a model, not an adapter", "name an adapter", param="adapters")
    return found.weights


def _no_adapter(found: Source, ref: str) -> Source:
    """Raises InvalidRequest for an adapter."""
    if found.is_adapter:
        hint = "name its base model with FROM, and the adapter with ADAPTER"
        raise InvalidRequest(f"FROM {quoted(ref)} is an adapter, not a model", hint, param="from")
    return found


def _always(weights: Weights) -> AdapterOption:
    """An adapter that is part of its model."""
    return AdapterOption(f"adapter-{weights.digest[:12]}", weights.path, always=True)


def _drop_packed(weights: Weights) -> int:
    """Removes packed weights, and returns their bytes."""
    try:
        return remove_packed(find_local(Path(weights.path)).weights)
    except (OSError, ModelFileError):  # the weights are gone, so nothing tells what was packed
        return 0


def _digests(entry: ModelEntry) -> set[str]:
    """The SHA-256 of all its files."""
    return {digest for weights in entry.all_weights for digest in weights.files.values()}


def _named(wanted: Name | None, found: ModelSource) -> Name:
    name = wanted or found.name
    if name is None:
        raise InvalidRequest(f"{found.weights.path} has no default name", "give the model a name", "name")
    return name


def _check_context(entry: ModelEntry) -> None:
    """Raises InvalidRequest if num_ctx exceeds the model's context length."""
    length, asked = entry.details.context_length, entry.parameters.get("num_ctx")
    if isinstance(asked, int) and length and asked > length:
        raise InvalidRequest(f"num_ctx is {asked}", f"the model has {length} positions; lower it", param="num_ctx")


def _checked(recipe: Modelfile) -> dict[str, Any]:
    """The fields of an entry that a recipe sets. Raises InvalidRequest that names an unsupported field."""
    if recipe.quantize is not None and recipe.quantize not in QUANTIZE:
        raise InvalidRequest(
            f"quantize is {recipe.quantize[:40]!r}", f"expected one of {', '.join(QUANTIZE)}", param="quantize"
        )
    if recipe.draft_quantize is not None and recipe.draft_quantize not in QUANTIZED:
        raise InvalidRequest(
            f"draft_quantize is {recipe.draft_quantize[:40]!r}",
            f"expected one of {', '.join(QUANTIZED)}",
            param="draft_quantize",
        )
    if not all(_is_message(message) for message in recipe.messages):
        raise InvalidRequest("each message must have a role and a text", f"roles: {', '.join(ROLES)}", param="messages")
    own = {name: getattr(recipe, name) for name in ("template", "system", "requires", "quantize", "messages")}
    return {name: value for name, value in own.items() if value}


def _is_message(message: Mapping[str, Any]) -> bool:
    return set(message) == {"role", "content"} and message["role"] in ROLES and isinstance(message["content"], str)


def _no_report(_: PullProgress) -> None:
    pass
