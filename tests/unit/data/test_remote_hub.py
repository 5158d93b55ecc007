"""hf://datasets/...: a server on this machine that answers as the Hugging Face hub does."""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qs, urlsplit

import pytest
from fsspec.config import conf

from megatron_ext.data import remote
from megatron_ext.data.remote import RemoteFile
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.prepare.inputs import find_files
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files

pytest.importorskip("huggingface_hub")

LINES = b"".join(json.dumps({"text": f"line {n} " + "é" * (n % 70)}).encode() + b"\n" for n in range(500))
COMMIT = {"id": "1" * 40, "title": "t", "date": "2026-01-01T00:00:00.000Z", "message": "", "authors": []}


class Hub(BaseHTTPRequestHandler):
    """One data set, owner/name, with the files of `files`."""

    files: ClassVar[dict[str, bytes]] = {}

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def _answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _entry(self, name: str) -> dict[str, Any]:
        content = self.files[name]
        return {
            "type": "file",
            "path": name,
            "size": len(content),
            "oid": hashlib.sha1(content, usedforsecurity=False).hexdigest(),
            "lastCommit": COMMIT,
        }

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if match := re.fullmatch(r"/datasets/owner/name/resolve/main/(.*)", path):
            begin, _, end = self.headers["Range"].removeprefix("bytes=").partition("-")
            self._answer(self.files[match[1]][int(begin) : int(end) + 1], 206)
        elif path.startswith("/api/datasets/owner/name/tree/main"):
            below = path.removeprefix("/api/datasets/owner/name/tree/main").strip("/")
            names = [name for name in self.files if name.startswith(below)]
            self._answer(json.dumps([self._entry(name) for name in names]).encode())
        elif path.startswith("/api/datasets/owner/name"):
            self._answer(json.dumps({"id": "owner/name", "sha": COMMIT["id"], "siblings": []}).encode())
        else:
            self._answer(b"{}", 404)

    def do_POST(self) -> None:
        wanted = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())["paths"]
        self._answer(json.dumps([self._entry(name) for name in wanted if name in self.files]).encode())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    from huggingface_hub import HfFileSystem, constants

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setitem(conf, "hf", {"endpoint": f"http://127.0.0.1:{server.server_port}"})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(remote, "sleep", lambda _: None)
    HfFileSystem.clear_instance_cache()
    Hub.files = {"a.jsonl": LINES, "b.jsonl": LINES.split(b"\n", 1)[0] + b"\n"}
    yield Hub
    HfFileSystem.clear_instance_cache()
    server.shutdown()
    server.server_close()


def _bytes(folder: Path, name: str, *inputs: str) -> bytes:
    encode_files(EncodeJob(inputs, str(folder / name), "ByteTokenizer", append_eod=True))
    return (folder / f"{name}_text_document.bin").read_bytes()


def test_the_hub_gives_the_bytes_of_the_disk(hub: type[Hub], tmp_path: Path) -> None:
    for name, content in hub.files.items():
        (tmp_path / name).write_bytes(content)
    expected = _bytes(tmp_path, "near", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"))
    assert _bytes(tmp_path, "pattern", "hf://datasets/owner/name/*.jsonl") == expected
    single = ["hf://datasets/owner/name/a.jsonl", "hf://datasets/owner/name/b.jsonl"]
    assert _bytes(tmp_path, "single", *single) == expected
    with pytest.raises(ConfigurationError, match="does not exist"):
        find_files(["hf://datasets/owner/name/c.jsonl"])


def test_a_file_that_the_hub_replaces(hub: type[Hub]) -> None:
    """Of the same size: only the hub's id of the content tells them apart."""
    file = RemoteFile("hf://datasets/owner/name/b.jsonl")
    assert file.version
    file.check_unchanged()
    hub.files["b.jsonl"] = hub.files["b.jsonl"].replace(b"line 0", b"line 1")
    with pytest.raises(DataError, match="was replaced while it was read"):
        file.check_unchanged()
