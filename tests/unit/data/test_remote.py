"""Preprocessing from a store gives the bytes of the same files on the disk: through failures, and continued."""

import gzip
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron_ext.data import remote
from megatron_ext.data.remote import RemoteFile, RemoteStream
from megatron_ext.errors import ConfigurationError, DataError, StorageError
from megatron_ext.plugins.prepare import documents
from megatron_ext.plugins.prepare.inputs import find_files
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files

LINES = [{"text": f"line {n} " + "é" * (n % 70), "other": str(n)} for n in range(2000)]
TOOL = Path(__file__).parents[3] / "tools" / "preprocess_data.py"


def lines_of(records: list[dict[str, str]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


@pytest.fixture
def store() -> Iterator[MemoryFileSystem]:
    """An empty memory://."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_BLOCK", 5000)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 5000)


def encoded(folder: Path, *inputs: str, name: str = "out", **settings: Any) -> dict[str, bytes]:
    """The bytes of the pair that these inputs give."""
    encode_files(EncodeJob(inputs, str(folder / name), "ByteTokenizer", append_eod=True, **settings))
    key = settings.get("json_keys", ("text",))[0]
    return {suffix: (folder / f"{name}_{key}_document{suffix}").read_bytes() for suffix in (".bin", ".idx")}


def write_all(folder: Path) -> None:
    """The same 2,000 records in files of every kind but text, and parts of them."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_bytes(lines_of(LINES[:700]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines_of(LINES[700:1500])))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(LINES[1500:]), folder / "c.parquet", row_group_size=100)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("small_blocks")
def test_a_store_gives_the_bytes_of_the_disk(workers: int, store: MemoryFileSystem, tmp_path: Path) -> None:
    write_all(tmp_path / "in")
    expected = encoded(tmp_path, str(tmp_path / "in"))
    for file in sorted((tmp_path / "in").iterdir()):
        store.pipe(f"/bucket/in/{file.name}", file.read_bytes())
    for inputs in (["memory://bucket/in"], ["memory://bucket/in/*.jsonl*", "memory://bucket/in/c.parquet"]):
        assert encoded(tmp_path, *inputs, name="far", workers=workers) == expected
    manifest, far = (json.loads((tmp_path / f"{name}_manifest.json").read_text()) for name in ("out", "far"))
    assert [one["sha256"] for one in manifest["inputs"]] == [one["sha256"] for one in far["inputs"]]
    assert far["inputs"][0]["path"] == "memory:///bucket/in/a.jsonl"
    other = encoded(tmp_path, "memory://bucket/in", name="other", json_keys=("other",))
    assert other == encoded(tmp_path, str(tmp_path / "in"), name="near", json_keys=("other",))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that are waited between attempts, which pass at once."""
    waited: list[float] = []
    monkeypatch.setattr(remote, "sleep", waited.append)
    return waited


class Link:
    """The way to memory://, every n-th read of which fails, and every one after it ends early; 0: none does."""

    def __init__(self) -> None:
        self.every = self.failing_looks = 0
        self.reads: list[tuple[int | None, int | None]] = []
        self.failed = self.short = 0


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    link = Link()
    cat, info = MemoryFileSystem.cat_file, MemoryFileSystem.info

    def cat_file(self: MemoryFileSystem, path: str, start: int | None = None, end: int | None = None, **more: Any):
        link.reads.append((start, end))
        if link.every and len(link.reads) % link.every == 0:
            link.failed += 1
            raise ConnectionResetError("the link is down")
        found = cat(self, path, start=start, end=end, **more)
        if link.every and len(link.reads) % link.every == 1:
            link.short += 1
            return found[:-1]
        return found

    def looked_at(self: MemoryFileSystem, path: str, **more: Any) -> dict[str, Any]:
        if link.failing_looks:
            link.failing_looks -= 1
            raise ConnectionResetError("the link is down")
        return info(self, path, **more)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
    monkeypatch.setattr(MemoryFileSystem, "info", looked_at)
    return link


@pytest.mark.usefixtures("small_blocks")
def test_a_link_that_fails_is_tried_again(
    store: MemoryFileSystem, tmp_path: Path, pauses: list[float], link: Link
) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines_of(LINES))
    store.pipe("/in.jsonl", lines_of(LINES))
    link.every = 4
    assert encoded(tmp_path, "memory://in.jsonl", name="far") == encoded(tmp_path, str(tmp_path / "in.jsonl"))
    assert link.failed > 2
    assert link.short > 2
    assert len(pauses) == link.failed + link.short


@pytest.mark.usefixtures("pauses")
def test_a_link_that_fails_says_nothing_of_what_is_there(store: MemoryFileSystem, link: Link) -> None:
    """fsspec's `exists` and `isdir` are False for whatever went wrong."""
    store.pipe("/in/a.jsonl", lines_of(LINES))
    link.failing_looks = 2
    assert [file.path for file in find_files(["memory://in"])] == ["memory:///in/a.jsonl"]
    link.failing_looks = 2
    assert RemoteFile("memory://in/a.jsonl").exists()
    link.failing_looks = 2
    assert not RemoteFile("memory://in/b.jsonl").exists()


def test_a_store_that_stays_away_ends_the_run(
    store: MemoryFileSystem, tmp_path: Path, pauses: list[float], link: Link
) -> None:
    store.pipe("/in.jsonl", lines_of(LINES))
    link.every = 1
    with pytest.raises(StorageError, match=r"in\.jsonl, bytes 0 to \d+ failed 7 times"):
        encoded(tmp_path, "memory://in.jsonl")
    assert pauses[:6] == [0.5, 1, 2, 4, 8, 16]
    assert not list(tmp_path.glob("out_*"))


def stopping(count: int) -> Callable[[object], None]:
    calls = []

    def report(progress: object) -> None:
        calls.append(progress)
        if len(calls) > count:
            raise KeyboardInterrupt

    return report


@pytest.mark.usefixtures("small_blocks")
def test_stopped_and_continued_from_a_store(store: MemoryFileSystem, tmp_path: Path) -> None:
    write_all(tmp_path / "in")
    expected = encoded(tmp_path, str(tmp_path / "in"))
    for file in sorted((tmp_path / "in").iterdir()):
        store.pipe(f"/in/{file.name}", file.read_bytes())
    job = EncodeJob(("memory://in",), str(tmp_path / "far"), "ByteTokenizer", append_eod=True, commit_interval=0)
    notes: list[str] = []
    for count in (5, 20, 40):
        with pytest.raises(KeyboardInterrupt):
            encode_files(job, stopping(count), notes.append)
    encode_files(job, note=notes.append)
    assert sum("going on behind" in note for note in notes) == 3
    assert {suffix: (tmp_path / f"far_text_document{suffix}").read_bytes() for suffix in expected} == expected
    with pytest.raises(KeyboardInterrupt):
        encode_files(job, stopping(20))
    store.pipe("/in/a.jsonl", (tmp_path / "in" / "a.jsonl").read_bytes())  # the same bytes at another time
    encode_files(job, note=notes.append)
    assert "is of other inputs or flags" in notes[-1] or "is of other inputs or flags" in " ".join(notes)


def test_a_file_that_is_replaced_meanwhile(store: MemoryFileSystem) -> None:
    store.pipe("/a.txt", b"one")
    file = RemoteFile("memory://a.txt")
    assert file.read(0, 100) == b"one"
    file.check_unchanged()
    store.pipe("/a.txt", b"two")
    with pytest.raises(DataError, match="was replaced while it was read"):
        file.check_unchanged()


def test_a_file_whose_size_alone_has_changed_was_replaced(store: MemoryFileSystem) -> None:
    """As where a store says no more than that, or a time of whole seconds."""
    store.pipe("/a.txt", b"one")
    file = RemoteFile("memory://a.txt")
    file.check_unchanged()
    created = store.info("/a.txt")["created"]
    for content, is_refused in ((b"one and more", True), (b"on", True), (b"two", False)):
        store.pipe("/a.txt", content)
        store.store["/a.txt"].created = created
        if not is_refused:
            file.check_unchanged()  # nothing tells it from the one before
            continue
        with pytest.raises(DataError, match="was replaced while it was read"):
            file.check_unchanged()


@pytest.mark.usefixtures("small_blocks")
def test_a_stream_reads_as_a_file_does(store: MemoryFileSystem) -> None:
    content = lines_of(LINES)
    store.pipe("/a", content)
    stream = RemoteStream(RemoteFile("memory://a"))
    for place, length in ((0, 10), (4990, 20), (12345, 30000), (len(content) - 5, 50), (7, 3), (len(content) + 9, 1)):
        stream.seek(place)
        found = b""
        while len(found) < length and (part := stream.read(length - len(found))):
            found += part
        assert found == content[place : place + length]
        assert stream.tell() == max(place, min(place + length, len(content)))


@pytest.mark.parametrize(
    ("url", "error", "message"),
    [
        ("memory://nothing.jsonl", ConfigurationError, "does not exist"),
        ("memory://bucket/a.csv", ConfigurationError, "must end in one of"),
        ("nosuch://bucket/a.jsonl", ConfigurationError, "cannot be read"),
        ("abfs://bucket/a.jsonl", ConfigurationError, "Install adlfs .* pip install the package"),
    ],
)
def test_urls_that_cannot_be_read(url: str, error: type[Exception], message: str, store: MemoryFileSystem) -> None:
    store.pipe("/bucket/a.csv", b"")
    with pytest.raises(error, match=message):
        find_files([url])


def test_a_folder_of_the_library_datasets(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "saved"
    folder.mkdir()
    names = [f"data-{number:05}-of-00012.arrow" for number in (0, 1)]
    for name, rows in zip(names, (LINES[:900], LINES[900:]), strict=True):
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=130)
    (folder / "cache-0.arrow").write_bytes(b"of another run")
    (folder / "dataset_info.json").write_text("{}")
    state: dict[str, Any] = {"_data_files": [{"filename": name} for name in names], "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state))
    (tmp_path / "in.jsonl").write_bytes(lines_of(LINES))
    assert encoded(tmp_path, str(folder)) == encoded(tmp_path, str(tmp_path / "in.jsonl"), name="lines")
    for broken, message in (
        ({**state, "_indices_data_files": [{"filename": "x"}]}, "flatten_indices"),
        ({"_data_files": [{"filename": "../in.arrow"}]}, "outside of the folder"),
        ({}, "is not one of the library datasets"),
    ):
        (folder / "state.json").write_text(json.dumps(broken))
        with pytest.raises(ConfigurationError, match=message):
            find_files([str(folder)])
    (folder / "state.json").write_text(json.dumps(state))
    (folder / names[1]).write_bytes((folder / names[1]).read_bytes()[:5000])
    with pytest.raises(DataError, match="not a stream of Arrow, or damaged after row"):
        encoded(tmp_path, str(folder))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A server on this machine that answers as S3 does."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed").ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "key"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_DEFAULT_REGION", "us-east-1"),
        ("AWS_ENDPOINT_URL", f"http://{host}:{port}"),
    ):
        monkeypatch.setenv(name, value)
    system = fsspec.filesystem("s3")
    system.mkdir("bucket")
    yield system
    fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


def test_s3_killed_and_continued(s3: Any, tmp_path: Path) -> None:
    write_all(tmp_path / "in")
    (tmp_path / "in" / "a.jsonl").write_bytes(lines_of(LINES) * 30)
    expected = encoded(tmp_path, str(tmp_path / "in"))
    for file in sorted((tmp_path / "in").iterdir()):
        s3.put(str(file), f"bucket/in/{file.name}")
    assert encoded(tmp_path, "s3://bucket/in", name="far", workers=2) == expected
    command = [sys.executable, str(TOOL), "--input", "s3://bucket/in", "--tokenizer-type", "ByteTokenizer"]
    command += ["--append-eod", "--commit-interval", "0", "--log-interval", "1", "--output-prefix", "killed"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("processed "):
        pass
    process.stderr.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    assert not list(tmp_path.glob("killed*.idx"))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "going on behind" in done.stderr
    assert {suffix: (tmp_path / f"killed_text_document{suffix}").read_bytes() for suffix in expected} == expected
    shutil.rmtree(tmp_path / "in")


@pytest.mark.parametrize("failures", [0, 1, 6])
def test_a_read_is_tried_seven_times(failures: int, pauses: list[float]) -> None:
    """With longer pauses each time; the test of a store that stays away has the seventh failure."""
    attempts = itertools.count(1)

    def read() -> str:
        if next(attempts) <= failures:
            raise ConnectionResetError("down")
        return "content"

    assert remote.tried_again("what", read) == "content"
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0][:failures]


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (FileNotFoundError("x"), StorageError),
        (PermissionError("x"), StorageError),
        (IsADirectoryError("x"), StorageError),
        (NotImplementedError("x"), StorageError),
        (ImportError("x"), StorageError),
        (TypeError("x"), StorageError),
        (ConfigurationError("x"), ConfigurationError),
        (DataError("x"), DataError),
    ],
)
def test_errors_that_cannot_pass_are_not_tried_again(
    error: Exception, raised: type[Exception], pauses: list[float]
) -> None:
    def read() -> None:
        raise error

    with pytest.raises(raised) as caught:
        remote.tried_again("what", read)
    if raised is StorageError:
        assert str(caught.value) == f"what: {type(error).__name__}: x. Check the name and the access"
    else:
        assert caught.value is error
    assert pauses == []


def test_bytes_behind_the_end_are_not_asked_for(store: MemoryFileSystem, link: Link) -> None:
    store.pipe("/a", b"0123456789")
    file = RemoteFile("memory://a")
    assert [file.read(*one) for one in ((0, 4), (8, 4), (10, 1), (20, 1), (3, 0))] == [b"0123", b"89", b"", b"", b""]
    assert link.reads == [(0, 4), (8, 10)]


def test_a_stream_reads_ahead_where_it_is_read_in_order_and_keeps_little(
    store: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four blocks ahead, eight kept; the one that is wanted is never the one that is let go."""
    monkeypatch.setattr(remote, "_BLOCK", 10)
    content = bytes(range(200)) + b"end"
    store.pipe("/a", content)
    file = RemoteFile("memory://a")
    stream = RemoteStream(file)

    def held(place: int) -> list[int]:
        stream.seek(place)
        buffer = bytearray(1)
        assert stream.readinto(buffer) == 1
        assert buffer[0] == content[place]
        return sorted(stream._blocks)

    assert held(0) == [0, 1, 2, 3, 4]
    assert held(1) == [0, 1, 2, 3, 4]
    assert held(15) == [0, 1, 2, 3, 4, 5]
    assert held(100) == [0, 1, 2, 3, 4, 5, 10]
    assert held(0) == [0, 1, 2, 3, 4, 5, 10], "from elsewhere none ahead"
    assert len(held(112)) == 8
    assert 0 in stream._blocks, "used last but for one"
    assert len(held(120)) == 8
    assert {12, 13, 14, 15, 16} <= set(stream._blocks)
    assert held(202)[-1] == 20
    assert stream.seek(-3, os.SEEK_END) == 200
    assert stream.read(9) == b"end"
    assert stream.seek(-500, os.SEEK_CUR) == 0
    assert stream.seek(5) == stream.tell() == 5
    assert stream.seek(2, os.SEEK_CUR) == 7
    stream.close()
    assert not stream._blocks


@pytest.mark.parametrize(
    ("info", "version"),
    [
        ({"ETag": "e", "mtime": 5}, "e"),
        ({"mtime": 5, "created": 6}, "5"),
        ({"LastModified": "now", "created": 6}, "now"),
        ({"ETag": None, "sha256": "s"}, "s"),
        ({"created": 0}, ""),
        ({}, ""),
    ],
)
def test_the_version_of_a_file_is_what_its_store_says(info: dict[str, Any], version: str) -> None:
    assert remote._version(info) == version
