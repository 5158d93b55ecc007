"""A preprocessing run that is killed goes on when it is started again, and ends with the same bytes."""

import dataclasses
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.data.indexed import Written
from megatron_ext.errors import DataError
from megatron_ext.plugins.prepare import documents
from megatron_ext.plugins.prepare.documents import InputHashes, ReadPosition
from megatron_ext.plugins.prepare.encode import Sample
from megatron_ext.plugins.prepare.journal import Journal, Progress
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files

TOOL = Path(__file__).parents[3] / "tools" / "preprocess_data.py"


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", 4096)


def write_corpus(folder: Path, length: int = 1000) -> list[str]:
    """Two files, some documents empty; returns their names. A document has at most 5 x `length` bytes."""
    chooser = random.Random(7)
    for name in ("a.jsonl", "b.jsonl"):
        with open(folder / name, "w") as file:
            for n in range(1000):
                text = "" if n % 50 == 0 else f"{n} " + "xyzé" * chooser.randint(1, length)
                file.write(json.dumps({"text": text, "title": str(n)}, ensure_ascii=False) + "\n")
    return ["a.jsonl", "b.jsonl"]


def hashes(folder: Path, prefix: str) -> dict[str, str]:
    return {
        path.name.removeprefix(prefix): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob(f"{prefix}_*")
    }


# Twenty kills are slow: they find moments that four may miss.
@pytest.mark.full
@pytest.mark.parametrize("kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(tmp_path: Path, kills: int):
    inputs = write_corpus(tmp_path, 4000)
    command = [sys.executable, str(TOOL), "--input", *inputs, "--tokenizer-type", "ByteTokenizer", "--append-eod"]
    command += ["--json-keys", "text", "title", "--commit-interval", "0", "--log-interval", "1", "--output-prefix"]
    subprocess.run([*command, "whole"], cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    expected = hashes(tmp_path, "whole")
    assert set(expected) == {
        *(f"_{key}_document.{suffix}" for key in ("text", "title") for suffix in ("bin", "idx")),
        "_manifest.json",
    }
    chooser = random.Random(os.getpid())
    continued = 0
    for number in range(kills):
        workers = ["--workers", "2"] if number % 2 else []
        process = subprocess.Popen([*command, "killed", *workers], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        lines = 0
        # The first two leave work behind, so that something is there to continue.
        wanted = chooser.randint(0, 3) if number > 1 else 2
        while lines < wanted and (line := process.stderr.readline()):
            continued += line.startswith("going on behind")
            lines += line.startswith("processed ")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stderr.close()
        assert not [*tmp_path.glob("killed*.idx"), *tmp_path.glob("killed*.bin")], "nothing under the final names"
    assert continued > 0
    subprocess.run([*command, "killed", "--workers", "2"], cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)
    assert {name: digest for name, digest in hashes(tmp_path, "killed").items() if "manifest" not in name} == {
        name: digest for name, digest in expected.items() if "manifest" not in name
    }
    manifest = (tmp_path / "killed_manifest.json").read_text().replace("killed_", "whole_")
    assert manifest == (tmp_path / "whole_manifest.json").read_text()
    assert not list(tmp_path.glob("*.partial*"))


class Stop(Exception):
    pass


def stop_after(count: int):
    calls = 0

    def report(progress: Progress) -> None:
        nonlocal calls
        calls += 1
        if calls > count:
            raise Stop

    return report


def job_of(folder: Path, inputs: list[str], **options) -> EncodeJob:
    paths = tuple(str(folder / name) for name in inputs)
    return EncodeJob(paths, str(folder / "out"), "ByteTokenizer", commit_interval=0, **options)


def test_standard_input_cannot_be_continued_so_nothing_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "in").write_bytes(b'{"text": "one"}\n' * 3)
    with open(tmp_path / "in") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        job = dataclasses.replace(job_of(tmp_path, []), inputs=("-",))
        noted: list[bool] = []
        progress = encode_files(job, lambda _: noted.append((tmp_path / "out.partial.json").exists()))
    assert progress.documents == 3
    assert noted
    assert not any(noted)


def test_other_inputs_start_from_the_beginning_and_bad_documents_do_not(tmp_path: Path):
    inputs = write_corpus(tmp_path)
    for change in ({"on_error": "skip"}, "touch"):
        with pytest.raises(Stop):
            encode_files(job_of(tmp_path, inputs), stop_after(5))
        assert (tmp_path / "out.partial.json").exists()
        if change == "touch":
            os.utime(tmp_path / "a.jsonl", (1, 1))
            change = {}
        notes: list[str] = []
        job = job_of(tmp_path, inputs, **change)
        assert encode_files(job, note=notes.append).documents == 2000
        # What to do with bad documents may change on the way: that is how one gets past one.
        expected = "going on behind" if job.on_error == "skip" else "is of other inputs or flags"
        assert sum(expected in note for note in notes) == 1


def test_a_run_that_stopped_at_a_bad_document_goes_on_with_on_error_skip(tmp_path: Path):
    inputs = write_corpus(tmp_path)
    with open(tmp_path / "b.jsonl", "a") as file:
        file.write("not json\n")
    with pytest.raises(DataError, match=r"b\.jsonl:1001: not a line of JSON"):
        encode_files(job_of(tmp_path, inputs))
    assert not list(tmp_path.glob("out_*.idx"))
    notes: list[str] = []
    progress = encode_files(job_of(tmp_path, inputs, on_error="skip"), note=notes.append)
    assert (progress.documents, progress.skipped) == (2000, 1)
    assert any(note.startswith("going on behind") for note in notes)


def test_a_journal_comes_back_as_it_was(tmp_path: Path):
    """But for the hash of the file that is being read, of which only a part is known."""
    journal = Journal(
        job={"inputs": [["a", 1, 2]]},
        position=ReadPosition(2, 77, 8),
        progress=Progress(1, 2, 3, 4, 5, None),
        written=[Written(10, 2, 1), Written(4, 2, 2)],
        blocks=9,
        samples=[(0, Sample("é", [1, 2])), (8, Sample("", []))],
        hashes=InputHashes({0: ("x", 1), 1: ("y", 2), 2: ("z", 3)}),
    )
    journal.save(tmp_path / "journal")
    found = Journal.load(tmp_path / "journal")
    assert found is not None
    assert found.hashes.of_files == {0: ("x", 1), 1: ("y", 2)}
    assert dataclasses.replace(found, hashes=journal.hashes) == journal
    assert Journal.load(tmp_path / "none") is None
    for content in ("{", "[]", "{}"):
        (tmp_path / "journal").write_text(content)
        assert Journal.load(tmp_path / "journal") is None


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "change",
    [
        {"append_eod": True},
        {"split_on": "x"},
        {"json_keys": ("title",)},
        {"data_format": "completion"},
        {"data_format": "completion", "seq_length": 90000},
        {"data_format": "completion", "train_on_inputs": True},
        {"data_format": "completion", "json_keys": ("title",)},
    ],
)
def test_flags_that_change_what_is_written_begin_anew(tmp_path: Path, change: dict[str, Any]):
    """Each by itself: a run of another one is not gone on with."""
    write_corpus(tmp_path, 10)
    base = {"data_format": "completion"} if len(change) > 1 else {}
    with pytest.raises(Stop):
        encode_files(job_of(tmp_path, ["a.jsonl"], **base), stop_after(3))
    assert (tmp_path / "out.partial.json").exists()
    notes: list[str] = []
    encode_files(job_of(tmp_path, ["a.jsonl"], **change), note=notes.append)
    assert [note for note in notes if "out.partial.json" in note] == [
        f"{tmp_path}/out.partial.json is of other inputs or flags: starting from the beginning"
    ]
    assert not [note for note in notes if "going on" in note]


@pytest.mark.parametrize("interval", [0.0, 1e9])
@pytest.mark.usefixtures("small_blocks")
def test_a_run_notes_how_far_it_is_every_few_seconds(tmp_path: Path, interval: float):
    """Of ten blocks; the last one that is told of when the run stops is not noted yet."""
    (tmp_path / "a.jsonl").write_text(('{"text": "%s"}\n' % ("x" * 4000)) * 10)
    job = dataclasses.replace(job_of(tmp_path, ["a.jsonl"]), commit_interval=interval)
    with pytest.raises(Stop):
        encode_files(job, stop_after(5))
    found = Journal.load(tmp_path / "out.partial.json")
    assert 4 <= found.blocks <= 6 if found else interval == 1e9
