"""A hub on loopback, which speaks so much of the Hugging Face hub's protocol as its clients ask of it."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

TOKEN = "hf_" + "notwritten" * 3
"""The token that gated repositories take."""


@dataclass
class Repository:
    """A model or a data set: its files by commit, the commits of its branches, and whether it is gated."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Add a commit with these files alone, as the newest of a branch; returns it."""
        digest = hashlib.sha1()
        for name, content in sorted(files.items()):
            digest.update(name.encode() + b"\0" + content)
        commit = digest.hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


class Hub:
    """The server.

    Attributes:
        models: repositories of models, by `org/name`.
        datasets: those of data sets.
        requests: method and path of each request so far.
        answers: the status of every answer, where it is not to answer as it should.
    """

    def __init__(self) -> None:
        self.models: dict[str, Repository] = {}
        self.datasets: dict[str, Repository] = {}
        self.requests: list[str] = []
        self.answers: int | None = None
        self._closed = False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET
            do_POST = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._closed = True  # connections stay open otherwise
        self._server.shutdown()
        self._server.server_close()

    def add_model(self, name: str, directory: Path | str, **more: bytes) -> str:
        """Commit the files of a directory to a model's repository; returns the commit."""
        files = {path.name: path.read_bytes() for path in Path(directory).iterdir() if path.is_file()}
        return self.models.setdefault(name, Repository()).commit(files | more)

    def add_dataset(self, name: str, files: dict[str, bytes]) -> str:
        """Commit files to a data set's repository; returns the commit."""
        return self.datasets.setdefault(name, Repository()).commit(files)

    def fetched(self) -> list[str]:
        """Return the files that were fetched so far."""
        return [
            request.split("/resolve/")[1].partition("/")[2]
            for request in self.requests
            if "GET" in request[:3] and "/resolve/" in request
        ]

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        if self._closed:
            request.close_connection = True
            return None
        if request.path == "/api/agent-harnesses":  # the client asks that of its own accord
            return _send_json(request, {})
        self.requests.append(f"{request.command} {request.path}")
        if self.answers is not None:
            return _send(request, self.answers, b"{}")
        parts = [unquote(part) for part in urlsplit(request.path).path.strip("/").split("/")]
        api = parts[0] == "api"
        parts = parts[1:] if api else parts
        kind = parts.pop(0) if api or parts[0] == "datasets" else "models"
        repositories = self.models if kind == "models" else self.datasets
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = repositories.get(name)
        if repository is None:
            return _send(request, 401, b"{}", {"X-Error-Code": "RepoNotFound"})
        if api and rest == ["refs"]:
            branches = [
                {"name": branch, "ref": f"refs/heads/{branch}", "targetCommit": commit}
                for branch, commit in repository.branches.items()
            ]
            return _send_json(request, {"branches": branches, "tags": [], "converts": []})
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.branches.get(revision, revision)
        if commit not in repository.commits:
            return _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        if api and rest[:1] == ["tree"]:
            recursive = parse_qs(urlsplit(request.path).query).get("recursive", ["false"])[0].lower() in ("true", "1")
            return _send_json(request, _list_tree(files, "/".join(rest[2:]), recursive))
        if api and rest[:1] == ["paths-info"]:
            body = request.rfile.read(int(request.headers["Content-Length"])).decode()
            asked = [path.strip("/") for path in parse_qs(body).get("paths", [])]
            parents = {path.rpartition("/")[0] for path in asked}
            entries = [entry for parent in parents for entry in _list_tree(files, parent, False)]
            return _send_json(request, [entry for entry in entries if entry["path"] in asked])
        if api:
            siblings = [{"rfilename": path} for path in files]
            return _send_json(
                request,
                {
                    "id": name,
                    "sha": commit,
                    "siblings": siblings,
                    "private": False,
                    "tags": [],
                    "downloads": 0,
                    "likes": 0,
                },
            )
        if repository.gated and request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return _send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        path = "/".join(rest[2:])
        if path not in files:
            return _send(request, 404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        etag = hashlib.sha1(files[path]).hexdigest()
        return _send(
            request, 200, files[path], {"X-Repo-Commit": commit, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"}
        )


def _described(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


def _list_tree(files: dict[str, bytes], folder: str, recursive: bool) -> list[dict[str, Any]]:
    """Describe the files below a folder; those of its folders, which are described in their place, if recursive."""
    prefix = f"{folder}/" if folder else ""
    below = {path: content for path, content in files.items() if path.startswith(prefix)}
    if recursive:
        return [_described(path, content) for path, content in below.items()]
    parts = dict.fromkeys(path.removeprefix(prefix).partition("/")[0] for path in below)
    return [
        _described(prefix + part, files[prefix + part])
        if prefix + part in files
        else {"type": "directory", "path": prefix + part, "size": 0, "oid": hashlib.sha1(part.encode()).hexdigest()}
        for part in parts
    ]


def _send_json(request: BaseHTTPRequestHandler, content: Any) -> None:
    _send(request, 200, json.dumps(content).encode(), {"Content-Type": "application/json"})


def _send(request: BaseHTTPRequestHandler, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
    request.send_response(status)
    for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
        request.send_header(name, value)
    request.end_headers()
    if request.command != "HEAD":
        request.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process and its children ask, with an empty cache."""
    server = Hub()
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.endpoint)
    template = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("enginehouse_rl.hub.snapshots._fetched", {})
    monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN_PATH", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    yield server
    server.close()


def enginehouse(*words: str, here: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own, whose client reads the variables of the hub as it is imported."""
    return subprocess.run(
        [sys.executable, "-m", "enginehouse.cli.main", *words],
        cwd=here, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
