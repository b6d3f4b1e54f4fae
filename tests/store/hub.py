"""A small hub on this machine, with checksums, ranges, and connections that break or send what they should not."""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from huggingface_hub import constants

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = 1000  # bytes from which on a file is identified by its SHA-256


class Hub:
    """Serves folders under `root` as repositories. `asked`: (file, first byte) of every download. cut: name -> bytes
    after which its first connection breaks. swapped: name -> other bytes that are sent in place of its own."""

    def __init__(self, root: Path):
        self.root, self.commit = root, COMMIT
        self.asked: list[tuple[str, int]] = []
        self.cut: dict[str, int] = {}
        self.swapped: dict[str, bytes] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def about(self, repository: str) -> dict | None:
        folder = self.root / repository
        if not folder.is_dir():
            return None
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        siblings = [_sibling(path, path.relative_to(folder).as_posix()) for path in files]
        return {"id": repository, "sha": self.commit, "siblings": siblings}


def _sibling(path: Path, name: str) -> dict:
    data = path.read_bytes()
    reported = {"rfilename": name, "size": len(data)}
    if len(data) >= LARGE:
        return {**reported, "lfs": {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 1}}
    return {**reported, "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}


def _tree(about: dict) -> list[dict]:
    files = about["siblings"]
    return [{"type": "file", "path": f["rfilename"], "size": f["size"], "oid": "0" * 40} for f in files]


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path.startswith("/api/models/"):
                org, name, *rest = path.removeprefix("/api/models/").split("/")
                about = hub.about(f"{org}/{name}")
                reported = _tree(about) if about and rest[:1] == ["tree"] else about
                return self.send(404 if about is None else 200, json.dumps(reported).encode())
            org, name, _, _, file = path[1:].split("/", 4)
            source = hub.root / org / name / file
            if not source.is_file():
                return self.send(404, b"")
            data = hub.swapped.get(file, source.read_bytes())
            first = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
            hub.asked.append((file, first))
            end = hub.cut.pop(file, None)
            self.send(206 if first else 200, data[first:], end and end - first)

        do_HEAD = do_GET

        def send(self, status: int, body: bytes, cut: int | None = None) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
            self.send_header("X-Repo-Commit", hub.commit)
            if status == 404:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:cut])
            if cut is not None:
                self.close_connection = True

        def log_message(self, *_) -> None:
            pass

    return Handler


def use(hub: Hub, monkeypatch, cache: Path) -> None:
    """Makes it the hub of this process."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_PROGRESS_BARS", True)
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
