"""The parts of a model hub that downloads and uploads of a policy need, on the loopback interface."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_of_the_fake_hub"


class FakeHub(ThreadingHTTPServer):
    """A server of model repositories with one commit each, which keeps its clients' requests."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}  # files by id and path
        self.private: set[str] = set()
        self.requests: list[str] = []  # methods and paths

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serve() -> Iterator[FakeHub]:
    with FakeHub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        """Keep the request, instead of writing it to standard error."""
        self.server.requests.append(f"{self.command} {self.path}")

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path).strip("/")
        for repo_id, files in self.server.repositories.items():
            if path in (f"api/models/{repo_id}", f"api/models/{repo_id}/revision/main"):
                siblings = [{"rfilename": name} for name in files]
                return self._answer(200, {"id": repo_id, "sha": COMMIT, "siblings": siblings})
            if path == f"api/models/{repo_id}/tree/{COMMIT}":
                return self._answer(200, [_tree_entry(name, content) for name, content in files.items()])
            for prefix in (f"{repo_id}/resolve/{COMMIT}/", f"{repo_id}/resolve/main/"):
                if path.startswith(prefix) and path.removeprefix(prefix) in files:
                    return self._send_file(files[path.removeprefix(prefix)])
        return self._answer(404, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._answer(401, {"error": "Invalid credentials"})
        path = urlsplit(self.path).path.strip("/")
        if path == "api/repos/create":
            return self._create(json.loads(body))
        if path == "api/validate-yaml":
            return self._answer(200, {"errors": [], "warnings": []})
        repo_id, _, action = path.removeprefix("api/models/").removesuffix("/main").rpartition("/")
        if action == "preupload":
            modes = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
            return self._answer(200, {"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        if action == "commit":
            return self._commit(repo_id, [json.loads(line) for line in body.splitlines()])
        return self._answer(501, {"error": f"the fake hub does not know {self.path}"})

    def _create(self, request: dict[str, Any]) -> None:
        repo_id = f"{request['organization']}/{request['name']}"
        exists = repo_id in self.server.repositories
        self.server.repositories.setdefault(repo_id, {})
        if request.get("visibility") == "private":
            self.server.private.add(repo_id)
        return self._answer(409 if exists else 200, {"url": f"{self.server.url}/{repo_id}", "name": repo_id})

    def _commit(self, repo_id: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["key"] == "file":
                content = base64.b64decode(line["value"]["content"])
                self.server.repositories[repo_id][line["value"]["path"]] = content
        return self._answer(
            200, {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.server.url}/{repo_id}/commit/{COMMIT}"}
        )

    def _send_file(self, content: bytes) -> None:
        headers = {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
        return self._send(200, content, {**headers, "Content-Type": "application/octet-stream"})

    def _answer(self, status: int, answer: Any, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(answer).encode()
        return self._send(status, content, {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


def _digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
