"""``magicrl push`` against a local fake of the hub: uploads, rejections, and where the token must not appear.

Large files use the hub's older way (LFS). Its newer one (Xet) is a binary protocol of huggingface_hub only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

TOKEN = "hf_secretsecretsecretsecret"
CARD = "---\nlicense: apache-2.0\n---\n# A model\n"
WEIGHTS = bytes(range(256)) * 64


@dataclass
class Hub:
    """Everything that the hub received."""

    address: str = ""
    refuses: bool = False
    made: list[dict[str, Any]] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)  # large files by SHA-256
    files: dict[str, bytes] = field(default_factory=dict)  # files of the commit, by path
    messages: list[str] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.stored[value["oid"]]


def replies(hub: Hub, path: str, body: bytes) -> Any:
    """Return the parts of the hub's interface that an upload needs."""
    if path == "/api/repos/create":
        hub.made.append(json.loads(body))
        return {"url": f"{hub.address}/me/small"}
    if path == "/api/validate-yaml":
        return {"errors": [], "warnings": []}
    if "/preupload/" in path:
        asked = json.loads(body)["files"]
        big = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in asked}
        return {"files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in big.items()]}
    if path.endswith("/info/lfs/objects/batch"):
        objects = json.loads(body)["objects"]
        put = [
            {**one, "actions": {"upload": {"href": f"{hub.address}/put/{one['oid']}", "header": {}}}} for one in objects
        ]
        return {"transfer": "basic", "objects": put}
    if "/commit/" in path:
        hub.commit([json.loads(line) for line in body.splitlines()])
        return {"commitUrl": f"{hub.address}/me/small/commit/abc", "commitOid": "abc", "hookOutput": ""}
    return {}


@pytest.fixture
def hub() -> Iterator[Hub]:
    found = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = self._body()
            if not self.path.startswith("/put/"):
                found.tokens.add(self.headers.get("Authorization"))
            if found.refuses:
                self.send_response(403)
                content = json.dumps({"error": f"no rights with {TOKEN}"}).encode()
            else:
                self.send_response(200)
                content = json.dumps(replies(found, self.path, body)).encode()
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(content)

        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def do_PUT(self) -> None:
            content = self._body()
            found.stored[hashlib.sha256(content).hexdigest()] = content
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                parts: list[bytes] = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.address = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    yield found
    server.shutdown()
    server.server_close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = tmp_path / "runs" / "small" / "model"
    model.mkdir(parents=True)
    (model.parent / "run.json").write_text("{}")
    (model / "README.md").write_text(CARD)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(WEIGHTS)
    return model.parent


def push(hub: Hub, run: Path, *words: str, token: str | None = TOKEN) -> subprocess.CompletedProcess[str]:
    own = {"HF_ENDPOINT": hub.address, "HF_HOME": str(run / "hf"), "HF_DEBUG": "1", "HF_HUB_DISABLE_XET": "1"}
    own |= {} if token is None else {"HF_TOKEN": token}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-m", "magicrl", "push", str(run), "me/small", *words]
    return subprocess.run(command, env=kept | own, capture_output=True, text=True, check=False, timeout=20)


def test_a_model_is_pushed_with_its_card(hub: Hub, run: Path) -> None:
    done = push(hub, run, "--message", "step 40")
    assert done.returncode == 0, done.stderr
    assert f"pushed: {hub.address}/me/small/commit/abc" in done.stdout
    assert hub.files["model.safetensors"] == WEIGHTS
    assert hub.files["README.md"].decode() == CARD
    assert hub.files.keys() == {"model.safetensors", "README.md", "config.json"}
    assert hub.messages == ["step 40"]
    assert [made.get("private", made.get("visibility")) for made in hub.made] in ([True], ["private"])
    assert hub.tokens - {None} == {f"Bearer {TOKEN}"}
    assert TOKEN not in done.stdout + done.stderr


def test_a_refusal_says_what_the_hub_says_without_the_token(hub: Hub, run: Path) -> None:
    hub.refuses = True
    done = push(hub, run)
    assert done.returncode == 1
    assert f"{hub.address} did not take the model" in done.stderr
    assert TOKEN not in done.stdout + done.stderr


def test_nothing_is_sent_without_a_token_a_model_or_a_card(hub: Hub, run: Path) -> None:
    done = push(hub, run, token=None)
    assert (done.returncode, "hf auth login" in done.stderr) == (1, True)
    assert push(hub, run, "--dry-run", token=None).returncode == 0
    (run / "model" / "README.md").unlink()
    done = push(hub, run)
    assert (done.returncode, "no model card" in done.stderr) == (2, True)
    (run / "model" / "model.safetensors").unlink()
    assert "neither a run folder nor a model" in push(hub, run).stderr
    assert not hub.made
