"""A server of this machine that answers as the Hugging Face hub does."""

from __future__ import annotations

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import HfFileSystem, constants, file_download


class Hub(http.server.BaseHTTPRequestHandler):
    """Folders as repositories: (kind, name, commit) -> folder, and the commit of `main` by (kind, name). Names that
    begin with "gated/" are gated."""

    folders: dict[tuple[str, str, str], Path]
    main: dict[tuple[str, str], str]
    asked: list[str]
    url: str

    @classmethod
    def enter(cls, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Makes this server the hub of the process, as HF_ENDPOINT does for one that begins."""
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setattr(constants, "ENDPOINT", cls.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        template = cls.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(file_download, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        HfFileSystem.clear_instance_cache()
        if any(kind == "datasets" for kind, _ in cls.main):
            monkeypatch.setattr("datasets.config.HF_ENDPOINT", cls.url)

    def do_HEAD(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.posted = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        self.asked.append(path)
        status, headers, body = self.answer([word for word in path.split("/") if word])
        if (wanted := self.headers.get("Range")) and status == 200:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(body) - 1) + 1, len(body))
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(body)}"
            status, body = 206, body[begin:end]
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_POST = do_HEAD

    def answer(self, words: list[str]) -> tuple[int, dict[str, str], bytes]:
        is_api, words = words[0] == "api", words[words[0] == "api" :]
        kind, words = (words[0], words[1:]) if words[0] in ("models", "datasets") else ("models", words)
        name, (what, revision, *rest) = "/".join(words[:2]), [*words[2:], "", ""][: max(2, len(words) - 2)]
        if name.startswith("gated/"):
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if (kind, name) not in self.main:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        commit = self.main[kind, name] if revision in ("", "main") else revision
        if (folder := self.folders.get((kind, name, commit))) is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if not is_api:
            path = folder.joinpath(*rest)
            if not path.is_file():
                return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
            body = path.read_bytes()
            return 200, {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit}, body
        paths = sorted(path for path in folder.rglob("*"))
        if what == "tree":
            paths = [path for path in paths if "recursive=True" in self.path or path.parent == folder.joinpath(*rest)]
            paths = [path for path in paths if folder.joinpath(*rest) in path.parents]
            return 200, {}, json.dumps([entry(folder, path) for path in paths]).encode()
        if what == "paths-info":
            asked = json.loads(self.posted)["paths"]
            paths = [folder / path for path in asked if (folder / path).exists()]
            return 200, {}, json.dumps([entry(folder, path) for path in paths]).encode()
        names = [path.relative_to(folder).as_posix() for path in paths if path.is_file()]
        files = [{"rfilename": name} for name in [*names, "pytorch_model.bin", "tokenizer.pkl"]]
        return 200, {}, json.dumps({"id": name, "sha": commit, "siblings": files}).encode()

    def log_message(self, *_: object) -> None:
        pass


def entry(folder: Path, path: Path) -> dict:
    size = path.stat().st_size if path.is_file() else 0
    kind = "file" if path.is_file() else "directory"
    return {"type": kind, "path": path.relative_to(folder).as_posix(), "size": size, "oid": "0" * 40}


@contextlib.contextmanager
def serving(folders: dict[tuple[str, str, str], Path]) -> Iterator[type[Hub]]:
    """Serves folders, by kind ("datasets", "models"), name and commit; the last commit of each name is its main."""
    main = {(kind, name): commit for kind, name, commit in folders}
    hub = type("OneHub", (Hub,), {"folders": folders, "main": main, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), hub)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
