#!/usr/bin/env python3
"""Fetches the libraries of the page from the npm registry into src/kvasir/serve/page/files/vendor.

    python scripts/vendor_page.py

Needs npm. Versions and hashes are fixed below. The files are the publishers' own, except that the style sheet of KaTeX
names WOFF2 fonts only, which all browsers read.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "src" / "kvasir" / "serve" / "page" / "files" / "vendor"


@dataclass(frozen=True)
class Library:
    """An npm package. integrity: SHA-512 of its archive in base64. files: in the package, by the names they get."""

    name: str
    version: str
    licence: str
    integrity: str
    files: dict[str, str]


LIBRARIES = (
    Library(
        "katex",
        "0.19.1",
        "MIT",
        "jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        {"katex.js": "dist/katex.min.js", "katex.css": "dist/katex.min.css", "katex.LICENSE": "LICENSE"},
    ),
    Library(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "BSD-3-Clause",
        "KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        {"highlight.js": "es/highlight.min.js", "highlight.LICENSE": "LICENSE"},
    ),
)


def unpacked(library: Library, folder: Path) -> Path:
    """Downloads and unpacks a package; returns its folder. Raises SystemExit if the archive has another hash."""
    command = ("npm", "pack", "--json", f"{library.name}@{library.version}")
    packed = json.loads(subprocess.run(command, cwd=folder, check=True, capture_output=True).stdout)
    archive = folder / packed[0]["filename"]
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != library.integrity:
        raise SystemExit(f"{library.name} {library.version} has the hash {found}, not {library.integrity}")
    into = folder / archive.stem
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    return into / "package"


def only_woff2(css: str) -> str:
    return re.sub(r',url\(fonts/[\w-]+\.(?:woff|ttf)\) format\("\w+"\)', "", css)


def main() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for library in LIBRARIES:
            package = unpacked(library, Path(folder))
            for name, path in library.files.items():
                text = (package / path).read_text()
                (FOLDER / name).write_text(only_woff2(text) if name.endswith(".css") else text)
            for font in sorted(package.glob("dist/fonts/*.woff2")):
                (FOLDER / "fonts").mkdir(exist_ok=True)
                shutil.copyfile(font, FOLDER / "fonts" / font.name)
            rows.append(f"{library.name} {library.version} {library.licence}\n")
    (FOLDER / "VERSIONS").write_text("".join(rows))


if __name__ == "__main__":
    main()
