"""Pulling from the Hugging Face hub into a folder: only the files that a model needs, resumed after an interruption,
and each file verified against the hub's checksum.

The client's settings apply (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). A model that is complete in the client's cache on
this machine is used from there.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any

from kvasir.errors import ModelFileError
from kvasir.store.files import CHUNK, Stopped, check, locked, make_folder, sha256_of
from kvasir.store.names import LATEST, Name
from kvasir.store.progress import PullProgress, Report
from kvasir.weights.hub import choose_files, find_on_hub
from kvasir.weights.local import ModelFiles, find_local

_MAX_FILES = 10_000
_SPARE_BYTES = 256 << 20  # bytes that must stay free on the disk


@dataclass(frozen=True, slots=True)
class HubFile:
    """One file of a repository. sha256: of large files; blob: git's object id of other files; either may be unknown."""

    name: str
    size: int | None
    sha256: str | None
    blob: str | None


@dataclass(frozen=True, slots=True)
class Pulled:
    files: ModelFiles
    revision: str
    sha256: dict[Path, str]  # of the files verified by it


def pull_from_hub(name: Name, models: Path, report: Report, stop: Event | None) -> Pulled:
    """The model of a name, in a folder of `models` or in the hub's own cache. Raises ModelFileError, Stopped."""
    repository, tag = name.repository, "" if name.tag.lower() == LATEST else name.tag
    assert repository is not None, "expected a hub name"
    ref = f"{repository}:{tag}" if tag else repository
    report(PullProgress("pulling manifest"))
    try:
        revision, listed = _list(repository)
    except ModelFileError as unreachable:
        try:
            return Pulled(find_on_hub(ref, None, allow_download=False), "", {})
        except ModelFileError:
            raise unreachable from None
    try:
        return Pulled(find_on_hub(ref, revision, allow_download=False), revision, {})
    except ModelFileError:
        pass  # not in the cache, or cached in another revision
    chosen = choose_files([file.name for file in listed], tag, repository)
    wanted = [file for file in listed if file.name in set(chosen)]
    folder = models / "--".join((*repository.split("/"), revision[:12], *([tag] if tag else [])))
    make_folder(folder)
    with locked(models / f".{folder.name}.lock", stop):
        make_folder(folder)
        _check_room(folder, wanted)
        sums = {folder / file.name: _fetch(repository, revision, file, folder, report, stop) for file in wanted}
    report(PullProgress("verifying sha256 digest"))
    first = chosen[0] if chosen[0].endswith(".gguf") else ""
    return Pulled(find_local(folder / first), revision, {path: sha256 for path, sha256 in sums.items() if sha256})


def _list(repository: str) -> tuple[str, list[HubFile]]:
    """The newest commit and its files. Raises ModelFileError."""
    from huggingface_hub import HfApi

    try:
        info = HfApi().model_info(repository, files_metadata=True, timeout=30)
    except Exception as error:  # the client raises many types, including those of its HTTP library
        raise _unreachable(repository, error) from error
    siblings = info.siblings or []
    if not info.sha or not info.sha.isalnum() or len(siblings) > _MAX_FILES:
        raise ModelFileError(f"{repository}: the hub names no commit, or {len(siblings)} files", "is it a model?")
    return info.sha, [_file(repository, sibling) for sibling in siblings]


def _file(repository: str, sibling: Any) -> HubFile:
    parts = sibling.rfilename.split("/")
    plain = sibling.rfilename.isprintable() and len(sibling.rfilename) <= 255  # a lone surrogate is not printable
    if not plain or any(part in ("", ".", "..") or "\\" in part for part in parts):
        raise ModelFileError(
            f"{repository}: a file is named {sibling.rfilename[:80]!r}",
            "do not use this repository: the name leaves its folder",
        )
    sha256 = sibling.lfs.sha256 if sibling.lfs else None
    return HubFile(sibling.rfilename, sibling.size, sha256, None if sha256 else sibling.blob_id)


def _check_room(folder: Path, files: Sequence[HubFile]) -> None:
    from huggingface_hub import constants

    for file in files:
        if (file.size or 0) > constants.MAX_HTTP_DOWNLOAD_SIZE:
            raise ModelFileError(
                f"{file.name} has {(file.size or 0) / 2**30:.0f} GiB, more than one download may have",
                "download it with `hf download`; Kvasir then loads it from that cache",
            )
    missing = sum((file.size or 0) for file in files if not (folder / file.name).exists())
    free = shutil.disk_usage(folder).free
    if missing + _SPARE_BYTES > free:
        raise ModelFileError(
            f"{folder}: {missing / 2**30:.1f} GiB are to be downloaded and {free / 2**30:.1f} GiB are free",
            "make room, or set KVASIR_MODELS to a folder elsewhere",
        )


def _fetch(repository: str, revision: str, file: HubFile, folder: Path, report: Report, stop: Event | None) -> str:
    """Downloads and verifies one file, unless it exists already. Returns its SHA-256 if the hub states it, else "".
    Raises ModelFileError."""
    path = folder / file.name
    if not path.exists():
        make_folder(path.parent)
        partial = path.with_name(path.name + ".partial")
        _download(repository, revision, file, partial, report, stop)
        _verify(repository, file, partial, stop)
        partial.replace(path)
    return file.sha256 or ""


def _download(repository: str, revision: str, file: HubFile, partial: Path, report: Report, stop: Event | None) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    check(stop)
    done = partial.stat().st_size if partial.exists() and file.sha256 else 0
    if file.size is not None and done > file.size:
        done = 0
    url, headers = hf_hub_url(repository, file.name, revision=revision), build_hf_headers()
    with _Counted(partial, done, file, report, stop) as out:
        try:
            http_get(url, out, resume_size=done, headers=headers, expected_size=file.size, tqdm_class=_silent())
        except (Stopped, ModelFileError):
            raise
        except Exception as error:
            raise _unreachable(f"{repository}/{file.name}", error) from error


class _Counted:
    """The file that the client writes to: reports progress, stops on request, and does not grow beyond the announced
    size."""

    def __init__(self, path: Path, done: int, file: HubFile, report: Report, stop: Event | None):
        self._out = path.open("r+b" if done else "wb")
        self._out.seek(done)
        self._out.truncate()
        self._path, self._file, self._report, self._stop = path, file, report, stop
        self._publish()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, data: bytes) -> int:
        check(self._stop)
        limit = self._file.size
        if limit is not None and self._out.tell() + len(data) > limit:
            raise ModelFileError(f"{self._file.name}: the hub sends more than the {limit} bytes that it announced")
        if limit is None and shutil.disk_usage(self._path.parent).free < _SPARE_BYTES + len(data):
            raise ModelFileError(f"{self._file.name}: the disk is full", "make room, or set KVASIR_MODELS")
        count = self._out.write(data)
        self._publish()
        return count

    def _publish(self) -> None:
        digest = self._file.sha256 or ""
        status = f"pulling {digest[:12] or self._file.name}"
        self._report(PullProgress(status, self._out.tell(), self._file.size or 0, digest))


def _verify(repository: str, file: HubFile, path: Path, stop: Event | None) -> None:
    """Raises ModelFileError, and removes the file, if its checksum is not the hub's."""
    if file.sha256:
        expected, found = file.sha256, sha256_of(path, stop=stop)
    elif file.blob:
        expected, found = file.blob, _git_id(path)
    else:
        return
    if expected != found:
        path.unlink()
        raise ModelFileError(f"{repository}/{file.name}: the checksum is {found}, expected {expected}", "pull it again")


def _git_id(path: Path) -> str:
    """Git's object id of a blob: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects"""
    digest = hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as data:
        while chunk := data.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _silent() -> type:
    """The client's progress bar class, with output disabled."""
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, name: str = "", **options: Any):
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent


def _unreachable(what: str, error: Exception) -> ModelFileError:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelFileError(
        f"{what}: cannot be downloaded from the hub: {first_line}",
        "check the name, the network, and HF_TOKEN for gated models",
    )
