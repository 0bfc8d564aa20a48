"""A local Hub: as much of the Hub's HTTP interface as `huggingface_hub` calls when a Trainer pushes a model.

Files live in memory. Large files take the Git LFS route (`HF_HUB_DISABLE_XET=1` in the client; the Xet protocol is not
spoken here). Every write needs the token. A request that the server does not know is answered with 501 and kept in
`unknown`, so that a test can insist that there was none.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_local_token"
USER = "someone"


@dataclass
class Repository:
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    """(message, the files as they were after it), oldest first"""

    @property
    def sha(self) -> str:
        return hashlib.sha1(str(len(self.commits)).encode()).hexdigest()


class Hub(ThreadingHTTPServer):
    """Serves until the `running` block ends."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.repositories: dict[str, Repository] = {}
        self.large_files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.unknown: list[str] = []
        self.lock = threading.Lock()
        self.read_only: set[str] = set()
        """Names of repositories that can be created but take no commit."""

    @classmethod
    @contextmanager
    def running(cls) -> Iterator[Hub]:
        hub = cls()
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            hub.server_close()
            thread.join()


class _Refused(Exception):
    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_POST(self) -> None:
        self._answer(
            {
                r"/api/repos/create": self._create,
                r"/api/validate-yaml": self._validate_yaml,
                r"/api/models/([^/]+/[^/]+)/preupload/[^/]+": self._preupload,
                r"/api/models/([^/]+/[^/]+)/commit/[^/]+": self._commit,
                r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch": self._lfs_batch,
                r"/lfs-verify": self._lfs_verify,
            }
        )

    def do_PUT(self) -> None:
        self._answer({r"/lfs/([0-9a-f]{64})": self._lfs_put})

    def do_GET(self) -> None:
        self._answer(
            {
                r"/api/agent-harnesses": lambda body: ({},),
                r"/api/whoami-v2": self._whoami,
                r"/api/models": self._models,
                r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?": self._model_info,
                r"/api/models/([^/]+/[^/]+)/tree/[^/]+(?:/(.*))?": self._tree,
                r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)": self._resolve,
            }
        )

    def do_HEAD(self) -> None:
        self._answer({r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)": self._resolve})

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the terminal quiet."""

    def _answer(self, routes: dict[str, Any]) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self._body()
        with self.server.lock:
            self.server.requests.append(f"{self.command} {path}")
            for pattern, handle in routes.items():
                if match := re.fullmatch(pattern, path):
                    try:
                        self._send(200, *handle(body, *match.groups()))
                    except _Refused as refused:
                        headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
                        self._send(refused.status, {"error": refused.message}, headers)
                    return
            self.server.unknown.append(f"{self.command} {self.path}")
        self._send(501, {"error": "The local Hub does not know this request."})

    def _send(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _require_token(self) -> None:
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            raise _Refused(401, "This request needs the token.")

    def _repository(self, name: str) -> Repository:
        if name not in self.server.repositories:
            raise _Refused(404, f"There is no repository {name}.", "RepoNotFound")
        return self.server.repositories[name]

    def _whoami(self, body: bytes) -> tuple[Any]:
        self._require_token()
        return ({"type": "user", "name": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}},)

    def _create(self, body: bytes) -> tuple[Any]:
        self._require_token()
        request = json.loads(body)
        name = f"{request['organization'] or USER}/{request['name']}"
        self.server.repositories.setdefault(name, Repository())
        return ({"url": f"{self.server.url}/{name}", "name": name},)

    def _validate_yaml(self, body: bytes) -> tuple[Any]:
        metadata = re.match(r"---\n(.*?)\n---\n", json.loads(body)["content"], re.DOTALL)
        if metadata is None or not isinstance(yaml.safe_load(metadata[1]), dict):
            raise _Refused(400, "The model card has no metadata.")
        return ({"errors": [], "warnings": []},)

    def _preupload(self, body: bytes, name: str) -> tuple[Any]:
        self._require_token()
        if name in self.server.read_only:
            raise _Refused(403, "The repository is read-only now.")
        present = self._repository(name).files
        answers = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            large = path.endswith((".safetensors", ".bin", ".pt", ".png")) or file["size"] > 10 * 2**20
            answer = {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if path in present:
                answer["oid"] = _sha256(present[path]) if large else _git_hash(present[path])
            answers.append(answer)
        return ({"files": answers},)

    def _lfs_batch(self, body: bytes, name: str) -> tuple[Any]:
        self._require_token()
        self._repository(name)
        objects = []
        for wanted in json.loads(body)["objects"]:
            answer: dict[str, Any] = {"oid": wanted["oid"], "size": wanted["size"]}
            if wanted["oid"] not in self.server.large_files:
                answer["actions"] = {
                    "upload": {"href": f"{self.server.url}/lfs/{wanted['oid']}"},
                    "verify": {"href": f"{self.server.url}/lfs-verify"},
                }
            objects.append(answer)
        return ({"transfer": "basic", "objects": objects},)

    def _lfs_put(self, body: bytes, oid: str) -> tuple[Any]:
        if _sha256(body) != oid:
            raise _Refused(400, "The content does not have the announced SHA-256.")
        self.server.large_files[oid] = body
        return (b"",)

    def _lfs_verify(self, body: bytes) -> tuple[Any]:
        self._require_token()
        request = json.loads(body)
        if len(self.server.large_files.get(request["oid"], b"")) != request["size"]:
            raise _Refused(404, "The large file is not here, or not in full.")
        return ({},)

    def _commit(self, body: bytes, name: str) -> tuple[Any]:
        self._require_token()
        repository = self._repository(name)
        message = ""
        for line in body.splitlines():
            operation = json.loads(line)
            kind, value = operation["key"], operation["value"]
            if kind == "header":
                message = value["summary"]
            elif kind == "file":
                repository.files[value["path"]] = base64.b64decode(value["content"], validate=True)
            elif kind == "lfsFile":
                repository.files[value["path"]] = self.server.large_files[value["oid"]]
            else:
                self.server.unknown.append(f"operation {kind!r} in a commit")
        repository.commits.append((message, dict(repository.files)))
        url = f"{self.server.url}/{name}/commit/{repository.sha}"
        return ({"success": True, "commitUrl": url, "commitOid": repository.sha},)

    def _models(self, body: bytes) -> tuple[Any]:
        """The repositories with all tags of the query, as the Hub's search by filters."""
        wanted = set(parse_qs(urlsplit(self.path).query).get("filter", []))
        found = [self._info(name) for name in sorted(self.server.repositories)]
        return ([info for info in found if wanted <= set(info["tags"])],)

    def _model_info(self, body: bytes, name: str) -> tuple[Any]:
        siblings = [{"rfilename": path} for path in sorted(self._repository(name).files)]
        return (self._info(name) | {"siblings": siblings},)

    def _info(self, name: str) -> dict[str, Any]:
        repository = self._repository(name)
        metadata = re.match(r"---\n(.*?)\n---\n", repository.files.get("README.md", b"").decode(), re.DOTALL)
        card = yaml.safe_load(metadata[1]) if metadata else {}
        # The Hub makes a tag of the base model.
        base = [f"base_model:{card['base_model']}"] if "base_model" in card else []
        tags = [*card.get("tags", []), *base]
        return {"id": name, "sha": repository.sha, "private": False, "tags": tags, "cardData": card}

    def _tree(self, body: bytes, name: str, folder: str | None) -> tuple[Any]:
        files = self._repository(name).files
        inside = [path for path in sorted(files) if path.startswith(f"{folder}/" if folder else "")]
        if folder and not inside:
            raise _Refused(404, f"There is no folder {folder}.", "EntryNotFound")
        return ([{"type": "file", "path": x, "size": len(files[x]), "oid": _git_hash(files[x])} for x in inside],)

    def _resolve(self, body: bytes, name: str, path: str) -> tuple[Any, dict[str, str]]:
        repository = self._repository(name)
        if path not in repository.files:
            raise _Refused(404, f"There is no file {path}.", "EntryNotFound")
        content = repository.files[path]
        headers = {"ETag": f'"{_sha256(content)}"', "X-Repo-Commit": repository.sha}
        return content, headers | {"Content-Type": "application/octet-stream"}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


if __name__ == "__main__":
    with Hub.running() as serving:
        print(f"export HF_ENDPOINT={serving.url} HF_TOKEN={TOKEN} HF_HUB_DISABLE_XET=1  # until Ctrl-C", flush=True)
        threading.Event().wait()
