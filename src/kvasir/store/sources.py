"""From a user's reference to weights and their facts: a bundled model, a path, a hub repository, or uploads."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from kvasir.environment import user_path
from kvasir.errors import InvalidRequest, ModelFileError
from kvasir.json_file import read_json_object
from kvasir.store.blobs import Blobs, parse_digest
from kvasir.store.entry import ADAPTER, Details, Weights
from kvasir.store.facts import read_details
from kvasir.store.files import locked, make_folder, remove_folder, sha256_of
from kvasir.store.hub import pull_from_hub
from kvasir.store.names import Name, is_name, parse_name
from kvasir.store.progress import PullProgress, Report
from kvasir.weights.find import ASSETS, BUNDLED
from kvasir.weights.local import ModelFiles, find_local

_MAX_FILES = 1000
_MAX_BASE = 200  # characters
_UPLOADED = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.(safetensors|gguf|json|jinja|model|txt)")
_HEX64 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model or an adapter. name: its default name; None if the caller must give one. base: what an adapter says about
    its base model."""

    name: Name | None
    weights: Weights
    details: Details
    base: str = ""

    @property
    def is_adapter(self) -> bool:
        return ADAPTER in self.details.capabilities


@dataclass(frozen=True, slots=True)
class Places:
    """The store's folder of weights, the other paths that may be named, and the callbacks for progress and stopping."""

    models: Path
    allowed_roots: tuple[Path, ...]
    any_path: bool
    report: Report
    stop: Event | None


def is_path(ref: str) -> bool:
    """Whether a text can only be a path."""
    return ref.startswith(("/", "./", "../", "~")) or ref in (".", "..") or ref.endswith(".gguf")


def find_source(refs: Sequence[str], places: Places, base: Path | None = None) -> ModelSource:
    """The weights that `refs` name: one reference, or the paths of one model's parts. base: the folder for relative
    paths. Raises InvalidRequest, ModelFileError, UnsupportedModel, Stopped."""
    ref = refs[0]
    if len(refs) == 1 and ref in BUNDLED:
        return _found(parse_name(BUNDLED[ref]), find_local(ASSETS / BUNDLED[ref]), ref, places)
    folder = base or Path.cwd()
    if is_path(ref) or len(refs) > 1 or (places.any_path and os.path.lexists(folder / ref)):
        files = _local(refs, folder, places)
        stem = files.weights[0].stem if files.kind == "gguf" else files.root.name
        return _found(parse_name(stem) if is_name(stem) else None, files, str(files.root), places)
    name = parse_name(ref)
    if name.repository is None:
        raise InvalidRequest(
            f"{ref} is not a model name of the hub",
            "write org/repo, org/repo:Q4_K_M for one GGUF file of several, a short name (qwen3:0.6b), or a path",
            param="model",
        )
    pulled = pull_from_hub(name, places.models, places.report, places.stop)
    return _found(name, pulled.files, ref, places, pulled.revision, pulled.sha256)


def from_uploads(files: Mapping[str, str], blobs: Blobs, places: Places) -> ModelSource:
    """The weights in uploaded blobs. files: file name -> digest of its blob. Raises as `find_source`."""
    if not files or len(files) > _MAX_FILES or not all(map(_UPLOADED.fullmatch, files)):
        raise InvalidRequest(
            "files are not a few plain names that end with .gguf, .safetensors, .json, .jinja, .model or .txt",
            "name each of them, with the digest of its blob",
            param="files",
        )
    sums = {name: parse_digest(digest) for name, digest in sorted(files.items())}
    missing = [digest for digest in files.values() if not blobs.has(digest)]
    if missing:
        raise InvalidRequest(f"there is no blob {missing[0]}", "upload the blob first", param="files")
    models = make_folder(places.models)
    folder = models / f"uploaded-{_digest_of(sums)[:24]}"
    with locked(models / f".{folder.name}.lock", places.stop):
        was_there = folder.exists()
        make_folder(folder)
        try:
            for name, digest in files.items():
                if not (folder / name).exists():
                    os.link(blobs.path(digest), folder / name)
            models_there = [name for name in sorted(files) if name.endswith(".gguf")]
            found = find_local(folder / models_there[0] if models_there else folder)
            return _found(None, found, "", places, sums={folder / name: digest for name, digest in sums.items()})
        except BaseException:
            if not was_there:  # no model uses it, and its links would keep the blobs forever
                remove_folder(folder, models)
            raise


def _local(refs: Sequence[str], base: Path, places: Places) -> ModelFiles:
    """The model at one path, or in the parts that several paths or a pattern name."""
    paths = [path for ref in refs for path in _expand(ref, base, places)]
    files = find_local(paths[0])
    if len(paths) > 1 and {path.resolve() for path in paths} != {path.resolve() for path in files.weights}:
        raise InvalidRequest("FROM names several files that are not parts of one model", "name one model", "from")
    if not places.any_path:
        for path in _all_files(files):
            _check_allowed(path, places)
    return files


def _expand(ref: str, base: Path, places: Places) -> list[Path]:
    if not places.any_path and not Path(ref).is_absolute():
        raise InvalidRequest(f"{ref[:200]!r} is a relative path", "give an absolute path", param="from")
    try:
        path = base / user_path(ref)
        if "*" in path.name:
            if not places.any_path:
                _check_allowed(path.parent, places)
            found = sorted(path.parent.glob(glob.escape(path.name).replace("[*]", "*")))
        else:
            found = [path]
        if not places.any_path:
            for one in found:
                _check_allowed(one, places)
        if not found or not all(one.exists() for one in found):
            raise ModelFileError(f"{path}: there is no such file or folder", "give a model folder or a .gguf file")
        return [one.absolute() for one in found]
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, ModelFileError | InvalidRequest):
            raise
        raise InvalidRequest(f"{ref[:200]!r} is not a path", "give a model folder or a .gguf file", "from") from error


def _check_allowed(path: Path, places: Places) -> None:
    """Raises InvalidRequest if the path is not allowed, without revealing whether the file exists."""
    real = path.resolve()
    if not any(real.is_relative_to(root.resolve()) for root in places.allowed_roots):
        hint = "name a repository of the hub, upload the files, or start the server with --model-root"
        raise InvalidRequest(f"{path} is not in a folder that models may be loaded from", hint, "from")


def _found(
    name: Name | None,
    files: ModelFiles,
    source: str,
    places: Places,
    revision: str = "",
    sums: Mapping[Path, str] | None = None,
) -> ModelSource:
    """Hashes the files without a known hash, and reads the headers."""
    details = read_details(files)
    known = {path: digest for path, digest in (sums or {}).items()}
    sha256: dict[str, str] = {}
    for path in _all_files(files):
        where = path.relative_to(files.root).as_posix()
        sha256[where] = known.get(path) or _named_by_sum(path) or _hash(path, places)
    path = files.weights[0] if files.kind == "gguf" else files.root
    weights = Weights(
        path=str(path.absolute()),
        format="gguf" if files.kind == "gguf" else "safetensors",
        size=sum(part.stat().st_size for part in files.weights),
        digest=next(iter(sha256.values())) if len(sha256) == 1 else _digest_of(sha256),
        files=sha256,
        source=source,
        revision=revision,
    )
    return ModelSource(name, weights, details, _base_of(files))


def _base_of(files: ModelFiles) -> str:
    """The base model that an adapter's config names; "" for anything else."""
    if files.kind != "adapter" or files.config is None:
        return ""
    named = read_json_object(files.config).get("base_model_name_or_path")
    return named if isinstance(named, str) and named.isprintable() and len(named) <= _MAX_BASE else ""


def _all_files(files: ModelFiles) -> list[Path]:
    beside = (
        files.config,
        files.generation_config,
        files.tokenizer_json,
        files.tokenizer_config,
        files.tokenizer_model,
    )
    extra = [*files.root.glob("*.jinja"), *files.root.glob("additional_chat_templates/*.jinja")]
    return [*files.weights, *(path for path in beside if path), *(sorted(extra) if files.config else ())]


def _named_by_sum(path: Path) -> str | None:
    """The SHA-256 in the file name, as the hub's cache names large files; else None."""
    real = path.resolve()
    return real.name if real.parent.name == "blobs" and _HEX64.fullmatch(real.name) else None


def _hash(path: Path, places: Places) -> str:
    size = path.stat().st_size

    def saw(done: int) -> None:
        places.report(PullProgress(f"hashing {path.name}", done, size))

    return sha256_of(path, saw, places.stop)


def _digest_of(sums: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
