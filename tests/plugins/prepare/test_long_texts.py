"""Long texts: the same bytes as short ones, in bounded memory."""

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow
import pyarrow.parquet
import pytest

from benchmarks.process_tree import Measured, measure
from megatron_ext.errors import DataError
from megatron_ext.plugins.prepare import documents, encode, encode_many, long_texts, parquet
from megatron_ext.plugins.prepare.documents import RawDocument
from megatron_ext.plugins.prepare.encode_many import plain_encoder
from megatron_ext.plugins.prepare.inputs import find_files
from megatron_ext.plugins.prepare.long_texts import split_strings
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files
from megatron_ext.tokenizer import tokenizer_protocol
from megatron_ext.tokenizer.from_flags import build_tokenizer
from megatron_ext.tokenizer.from_sentencepiece import SentencePieceTokenizer
from megatron_ext.tokenizer.probe_texts import probe_texts
from megatron_ext.tokenizer.tokenizer_protocol import beginning, between_words, in_pieces

# Of the second tier: tests/plugins/prepare/test_preprocess.py encodes.
pytestmark = pytest.mark.full

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"
TOOL = Path(__file__).parents[3] / "tools" / "preprocess_data.py"
HF = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(GOLDEN / "hf_bpe")]
SENTENCE = "A line of text that goes on, and 123 numbers; "


@pytest.fixture
def long_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of over 100 bytes are long, and pieces of them have 40."""
    for module in (long_texts, documents, parquet, encode_many, tokenizer_protocol):
        if hasattr(module, "LONG"):
            monkeypatch.setattr(module, "LONG", 100)
        if hasattr(module, "_PIECE"):
            monkeypatch.setattr(module, "_PIECE", 40)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 300)
    monkeypatch.setattr(parquet, "_BLOCK_BYTES", 300)
    monkeypatch.setattr(encode, "_LONG_BLOCK", 300)


@pytest.fixture
def sentencepiece_holds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_many, "_LONGEST", {SentencePieceTokenizer: 200})


def random_texts(count: int) -> list[str]:
    chooser = random.Random(9)
    words = ["word", "né", "中文", "😀", '"', "\\", "\n", "\t", " ", "\0", "/", "0123456789", "\\u00e9", "udc00"]
    return ["".join(chooser.choices(words, k=chooser.randint(0, 120))) for _ in range(count)]


@pytest.mark.usefixtures("long_is_short")
@pytest.mark.parametrize("ascii_only", [True, False])
def test_long_strings_are_split_off_a_line_as_json_reads_them(ascii_only: bool):
    texts = random_texts(600)
    kept = 0
    for one, other in zip(texts[::2], texts[1::2], strict=True):
        value = {"text": one, "meta": {"n": 1, "deep": other}, "title": other, "list": [one]}
        line = json.dumps(value, ensure_ascii=ascii_only).encode() + b"\n"
        found = split_strings(line)
        if found is not None:
            kept += 1
            assert {key: beginning(found[key], 10**6) for key in ("text", "title")} == {"text": one, "title": other}
            assert any(isinstance(found[key], bytes) for key in ("text", "title")) or len(line) > 200
        assert RawDocument("f", 1, line, is_json=True).texts(["title"])[0] in (other, other.encode())
    assert kept > 100


@pytest.mark.usefixtures("long_is_short")
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "%s\xff"}' % (b"a" * 500), "not UTF-8 at byte 510"),
        (b'{"text": "ok", "meta": "%s\xff"}' % (b"a" * 500), "not UTF-8 at byte 524"),
        (b'{"text": "%s\\q"}' % (b"a" * 500), "not a line of JSON: Invalid"),
        (b'{"text": "%s' % (b"a" * 500), "not a line of JSON: Unterminated string"),
        (b'["%s"]' % (b"a" * 500), "this is list"),
        (b'{"body": "%s"}' % (b"a" * 500), "key \"text\" is missing; the keys are ['body']"),
    ],
)
def test_bad_long_lines_are_named_as_short_ones(line: bytes, message: str):
    with pytest.raises(DataError) as caught:
        RawDocument("f", 7, line, is_json=True).texts(["text"])
    assert str(caught.value).startswith("f:7: ")
    assert message in str(caught.value)


@pytest.mark.usefixtures("long_is_short")
def test_a_lone_surrogate_is_left_to_the_tokenizer():
    line = b'{"text": "%s\\ud800"}' % (b"a" * 500)
    assert split_strings(line) is None
    assert RawDocument("f", 1, line, is_json=True).texts(["text"]) == ["a" * 500 + "\ud800"]
    assert split_strings(b'{"text": "%s", "t": "\\uDC000"}' % (b"a" * 500)) is None  # looks like our mark


@pytest.mark.usefixtures("long_is_short")
@pytest.mark.parametrize("pattern", ["ByteLevel", "v1", "v2"])
def test_a_text_cut_between_words_has_the_same_ids(tmp_path: Path, pattern: str):
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(GOLDEN / "hf_bpe"))
    if pattern != "ByteLevel":
        entries = [{"rank": n, "token_bytes": _base64(bytes([n])), "token_str": ""} for n in range(256)]
        entries += [{"rank": 256 + n, "token_bytes": _base64(b), "token_str": ""} for n, b in enumerate([b" a", b"th"])]
        (tmp_path / "vocab.json").write_text(json.dumps(entries))
        tokenizer = build_tokenizer("TikTokenizer", str(tmp_path / "vocab.json"), 1258, tiktoken_pattern=pattern)
    assert tokenizer.splits_between_words()  # type: ignore[attr-defined]
    texts = probe_texts(tokenizer, 400, 5)
    joined_texts = ["".join(texts[n : n + 9]) + " and some words " * 20 + texts[n] for n in range(150)]
    pieces = [list(between_words(one)) for one in joined_texts]
    assert all("".join(parts) == one for parts, one in zip(pieces, joined_texts, strict=True))
    assert sum(map(len, pieces)) > 1000
    plain = plain_encoder(tokenizer)
    for one in joined_texts:
        for form in (one, one.encode()):
            assert plain([form])[0].tolist() == tokenizer.encode(one)


def _base64(token: bytes) -> str:
    import base64

    return base64.b64encode(token).decode()


def test_a_tokenizer_that_looks_around_is_not_cut(tmp_path: Path):
    model = json.loads((GOLDEN / "hf_bpe" / "tokenizer.json").read_text())
    config = (GOLDEN / "hf_bpe" / "tokenizer_config.json").read_text()
    changes = {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "added_tokens": [*model["added_tokens"], {**model["added_tokens"][0], "id": 1200, "content": "a b"}],
    }
    for key, value in changes.items():
        folder = tmp_path / key
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps({**model, key: value}))
        (folder / "tokenizer_config.json").write_text(config)
        tokenizer = build_tokenizer("HuggingFaceTokenizer", str(folder))
        assert not tokenizer.splits_between_words(), key  # type: ignore[attr-defined]


@pytest.mark.usefixtures("long_is_short")
def test_pieces_of_utf8():
    for one in random_texts(100):
        assert "".join(in_pieces(one.encode())) == "".join(in_pieces(one)) == one
        assert beginning(one.encode(), 33) == one[:33]


@pytest.mark.usefixtures("long_is_short")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_long_documents_have_the_bytes_of_short_ones(tmp_path: Path, kind: str, count: int):
    texts = [f"{n} {one}" for n, one in enumerate(random_texts(200))]
    texts[20] = texts[20] * 30 + "\U000e0080"  # an unassigned character: through the reference
    if kind == "jsonl":
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    elif kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "in.parquet", row_group_size=90)
    else:
        (tmp_path / "in.txt").write_bytes("\x1e".join(texts).encode())
    job = EncodeJob(
        (str(tmp_path / f"in.{kind}"),), str(tmp_path / "out"), "HuggingFaceTokenizer", str(GOLDEN / "hf_bpe"),
        split_on="\x1e", workers=count, append_eod=True,
    )  # fmt: skip
    progress = encode_files(job)
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(GOLDEN / "hf_bpe"))
    expected = [token for one in texts for token in (*tokenizer.encode(one), tokenizer.eod)]
    assert progress.documents == len(texts)
    assert np.fromfile(tmp_path / "out_text_document.bin", np.uint16).tolist() == expected


@pytest.mark.usefixtures("sentencepiece_holds_little")
@pytest.mark.usefixtures("long_is_short")
@pytest.mark.parametrize("count", [1, 2])
def test_a_text_too_long_to_be_held_or_cut_is_named(tmp_path: Path, count: int, normalizing: str):
    kinds = {
        "HuggingFaceTokenizer": (normalizing, 100),
        "SentencePieceTokenizer": (str(GOLDEN / "spm_unigram.model"), 200),
    }
    for kind, (model, longest) in kinds.items():
        texts = ["short", SENTENCE * 7, "a" * longest, "last"]
        (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
        job = EncodeJob(
            (str(tmp_path / "in.jsonl"),), str(tmp_path / "out"), kind, model, fast_tokenizer=False, workers=count
        )
        with pytest.raises(
            DataError, match=rf"in\.jsonl:2: the text cannot be encoded: 0\.0 MB are too long for {kind}"
        ):
            encode_files(job)
        progress = encode_files(dataclasses.replace(job, on_error="skip"))
        assert (progress.documents, progress.skipped) == (3, 1)


@pytest.fixture
def normalizing(tmp_path: Path) -> str:
    """A tokenizer with a normalizer, whose texts cannot be cut."""
    folder = tmp_path / "normalizing"
    shutil.copytree(GOLDEN / "hf_bpe", folder)
    model = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**model, "normalizer": {"type": "NFC"}}))
    return str(folder)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each batch of rows that pyarrow reads, where a batch may have 100,000."""
    sizes: list[int] = []
    read = pyarrow.parquet.ParquetFile.iter_batches

    def measured(*arguments: Any, **named: Any) -> Iterator[pyarrow.RecordBatch]:
        for rows in read(*arguments, **named):
            sizes.append(rows.nbytes)
            yield rows

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", measured)
    monkeypatch.setattr(parquet, "_MOST_BYTES", 100_000)
    return sizes


@pytest.mark.parametrize("kind", ["equal", "plain", "delta"])
def test_long_rows_that_stand_together_are_read_a_few_at_a_time(tmp_path: Path, kind: str, batches: list[int]):
    texts = ["short"] * 2000 + ["long " * 4000] * 60 + ["short"] * 2000
    path = tmp_path / "in.parquet"
    options: dict[str, Any] = {"equal": {}, "plain": {"use_dictionary": False}, "delta": DELTA}[kind]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, **options)
    assert pyarrow.parquet.ParquetFile(path).num_row_groups == 1
    (file,) = find_files([str(path)])
    assert [row["text"] for rows, _, _ in parquet.read_rows(file, ["text"]) for row in rows] == texts
    assert 20_000 < max(batches) < 110_000


DELTA = {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}


def run_with_a_line(folder: Path, megabytes: int, ending: str, *flags: str, exit_code: int = 0) -> Measured:
    with open(folder / "in.jsonl", "w", encoding="utf-8") as file:
        file.write('{"text": "short"}\n{"text": "')
        file.writelines(SENTENCE * 1000 for _ in range(megabytes * 1000 // len(SENTENCE)))
        file.write(ending + '"}\n')
    command = [sys.executable, str(TOOL), "--input", "in.jsonl", "--output-prefix", "out", "--append-eod", *flags]
    measured = measure(command, cwd=str(folder))
    assert measured.exit_code == exit_code, measured.output
    (folder / "in.jsonl").unlink()
    (folder / "out_text_document.bin").unlink(missing_ok=exit_code != 0)
    return measured


# A text with an emoji: Python would take four bytes a character.
ENDINGS = ["a", "中", "😀"]


@pytest.mark.parametrize("flags", [["--tokenizer-type", "ByteTokenizer"], HF], ids=["bytes", "huggingface"])
def test_memory_with_a_line_of_10_megabytes(tmp_path: Path, flags: list[str]):
    # 100 MB for the program, and a tenth of what the line of 100 MB may take.
    assert run_with_a_line(tmp_path, 10, "😀", *flags).peak_bytes < 100e6 + (1000e6 - 100e6) / 10


# Slow: ten times the line of the test above, which allows a tenth of the memory.
@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "7"])
@pytest.mark.parametrize("ending", [*ENDINGS, "\U000e0080"])
def test_memory_with_a_line_of_100_megabytes(tmp_path: Path, workers: str, ending: str):
    for flags in (HF, ["--tokenizer-type", "ByteTokenizer"]):
        assert run_with_a_line(tmp_path, 100, ending, *flags, "--workers", workers).peak_bytes < 1e9


# Slow: 100 MB; the test above refuses shorter texts in the same words.
@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "7"])
def test_a_line_of_100_megabytes_that_cannot_be_cut(tmp_path: Path, workers: str, normalizing: str):
    unigram = ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(GOLDEN / "spm_unigram.model")]
    plain = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", normalizing, "--plain-tokenizer"]
    for flags in (unigram, plain):
        measured = run_with_a_line(tmp_path, 100, "a", *flags, "--workers", workers, exit_code=65)
        assert "error: in.jsonl:2: the text cannot be encoded: 100.0 MB are too long" in measured.output
        assert measured.peak_bytes < 1e9


# Slow: a GB of text in each form of parquet.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal", "plain", "delta"])
def test_memory_with_a_cluster_of_long_rows(tmp_path: Path, kind: str):
    texts = [f"{n} row" for n in range(20_000)] + [SENTENCE * 200_000 + str(n % 7) for n in range(120)]  # 9 MB each
    options = {"equal": {}, "plain": {"use_dictionary": False}, "delta": DELTA}[kind]
    schema = pyarrow.schema({"text": pyarrow.large_string()})
    table = pyarrow.table({"text": texts}, schema)
    pyarrow.parquet.write_table(
        table, tmp_path / "in.parquet", row_group_size=len(texts), write_batch_size=1, **options
    )
    command = [sys.executable, str(TOOL), "--input", "in.parquet", "--output-prefix", "out", *HF]
    measured = measure(command, cwd=str(tmp_path))
    assert measured.exit_code == 0, measured.output
    assert measured.peak_bytes < 1e9


# Slow: 60 rows of 9 MB, by one and by seven workers.
@pytest.mark.slow
def test_memory_with_long_rows(tmp_path: Path):
    table = pyarrow.table({"text": [SENTENCE * 200_000 + "😀" for _ in range(60)]})  # 9 MB each
    pyarrow.parquet.write_table(table, tmp_path / "in.parquet")
    command = [sys.executable, str(TOOL), "--input", "in.parquet", "--output-prefix", "out", *HF, "--workers"]
    for count in ("1", "7"):
        measured = measure([*command, count], cwd=str(tmp_path))
        assert measured.exit_code == 0, measured.output
        assert measured.peak_bytes < 1e9


def test_workers_end_with_their_killed_parent(tmp_path: Path):
    with open(tmp_path / "in.jsonl", "w") as file:
        file.writelines(json.dumps({"text": "x" * 2000}) + "\n" for _ in range(20_000))
    arguments = ["--input", "in.jsonl", "--output-prefix", "out", "--tokenizer-type", "ByteTokenizer", "--workers", "3"]
    command = [sys.executable, str(TOOL), *arguments, "--log-interval", "100"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("processed "):
        assert process.poll() is None
    children = psutil.Process(process.pid).children(recursive=True)
    assert len(children) == 3
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stderr.close()
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
    (tmp_path / "in.jsonl").write_text('{"text": "x"}\n')
    start = time.monotonic()
    subprocess.run(command, cwd=tmp_path, check=True, stderr=subprocess.DEVNULL)  # nobody holds the lock
    assert time.monotonic() - start < 60


def test_a_process_with_other_threads_does_not_fork_its_workers(tmp_path: Path):
    stop = threading.Event()
    threading.Thread(target=stop.wait).start()
    try:
        model = str(GOLDEN / "hf_bpe")
        prefix = str(tmp_path / "hf_eod")
        job = EncodeJob(
            (str(GOLDEN / "input.jsonl"),), prefix, "HuggingFaceTokenizer", model, append_eod=True, workers=2
        )
        encode_files(job)
    finally:
        stop.set()
    for suffix in ("bin", "idx"):
        name = f"hf_eod_text_document.{suffix}"
        assert (tmp_path / name).read_bytes() == (GOLDEN / name).read_bytes()
