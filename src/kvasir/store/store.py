"""Store: the models of this user, each under a name. Owns its folder:

    manifests/NAME.json    what the store knows of a model; it is there when all else of it is
    models/FOLDER/         weights of its own, pulled or uploaded, with all that belongs to them
    blobs/sha256-HEX       files uploaded for a model to come
    templates/HEX.jinja    templates of models that bring their own
    lock                   held while manifests change

Several processes may use one store. A change is seen by all at once, since a manifest is replaced whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from kvasir.config import EngineOptions, models_dir
from kvasir.store.entry import Entry
from kvasir.store.modelfile import Modelfile


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull or a creation is. completed, total: bytes of the file named by `digest` (its SHA-256, or ""),
    0 where there is nothing to count."""

    status: str
    completed: int = 0
    total: int = 0
    digest: str = ""


Report = Callable[[Progress], None]


class Store:
    """All methods may be called from any thread. Those that say so take long; the rest reads small files."""

    def __init__(self, root: Path | None = None, allowed_roots: Sequence[Path] = (), any_path: bool = False):
        """allowed_roots: folders under which weights may be named by a path. any_path: for the user's own commands."""
        self.root = root or models_dir()
        self.allowed_roots = tuple(allowed_roots)
        self.any_path = any_path

    # -- what there is -------------------------------------------------------------------------------------

    def list(self) -> list[Entry]:
        """All models, the last changed first."""
        raise NotImplementedError

    def get(self, name: str) -> Entry:
        """Raises ModelNotFound, InvalidRequest for what is no name."""
        raise NotImplementedError

    def find(self, name: str) -> Entry | None:
        """The same; None where there is none, or no such name."""
        raise NotImplementedError

    def options(self, entry: Entry, base: EngineOptions) -> EngineOptions:
        """How the model is loaded: `base`, and over it what the entry says."""
        raise NotImplementedError

    # -- changes -------------------------------------------------------------------------------------------

    def pull(self, ref: str, name: str | None = None, report: Report | None = None, stop: Event | None = None) -> Entry:
        """Gets a model (`hf.co/org/repo[:quant]`, `org/repo`, a path, kvasir-mini) and names it; takes long.

        What was pulled before is taken up where it stopped. `stop` ends it with Stopped.
        Raises InvalidRequest, ModelFileError, UnsupportedModel.
        """
        raise NotImplementedError

    def create(
        self,
        name: str,
        recipe: Modelfile,
        *,
        files: Mapping[str, str] | None = None,
        base: Path | None = None,
        report: Report | None = None,
        stop: Event | None = None,
    ) -> Entry:
        """A model from another one, from the hub, from a path, or from uploaded files; takes long.

        files: name -> "sha256:HEX" of a blob, in place of the recipe's `from_`. base: what its paths are relative to.
        Raises as `pull`, and ModelNotFound.
        """
        raise NotImplementedError

    def copy(self, source: str, target: str) -> Entry:
        """Raises ModelNotFound, InvalidRequest."""
        raise NotImplementedError

    def remove(self, name: str) -> Entry:
        """Also removes weights of the store's own that no other model uses. Raises ModelNotFound, InvalidRequest."""
        raise NotImplementedError

    # -- uploads -------------------------------------------------------------------------------------------

    def has_blob(self, digest: str) -> bool:
        """digest: "sha256:HEX". Raises InvalidRequest for another form."""
        raise NotImplementedError

    def receive(self, digest: str) -> BlobWriter:
        """Takes a file that must have this SHA-256. Raises InvalidRequest for another form of digest."""
        raise NotImplementedError


class BlobWriter:
    """A file on its way into the store: `with store.receive(digest) as writer: writer.write(...); writer.keep()`.
    What is not kept is removed."""

    def __enter__(self) -> BlobWriter:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write(self, data: bytes) -> None:
        """Raises InvalidRequest where more comes than the disk has room for."""
        raise NotImplementedError

    def keep(self) -> None:
        """Raises InvalidRequest where the bytes are not those of the digest."""
        raise NotImplementedError
