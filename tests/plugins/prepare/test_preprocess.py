import hashlib
import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.errors import ConfigurationError, DataError, StorageError
from megatron_ext.plugins.prepare import documents, encode, preprocess
from megatron_ext.plugins.prepare.documents import Block, ReadPosition
from megatron_ext.plugins.prepare.encode import BlockEncoder
from megatron_ext.plugins.prepare.encode_many import fast_encoder, plain_encoder
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files
from megatron_ext.tokenizer.from_flags import build_tokenizer
from megatron_ext.tokenizer.probe_texts import probe_texts
from megatron_ext.tokenizer.simple import ByteTokenizer
from tests.support.full_disk import files_up_to

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"
TOOL = Path(__file__).parents[3] / "tools" / "preprocess_data.py"


@pytest.fixture(params=[0, 10**9])
def long_from(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every document counts as a long one, or none does."""
    monkeypatch.setattr(encode, "_LONG_DOCUMENT", request.param)


def encode_bytes(folder: Path, *inputs: Path, **options) -> IndexedDataset:
    job = EncodeJob(tuple(map(str, inputs)), str(folder / "out"), tokenizer_type="ByteTokenizer", **options)
    encode_files(job)
    return IndexedDataset(str(folder / "out_text_document"))


def texts(dataset: IndexedDataset) -> list[str]:
    return [
        "".join("|" if token == 256 else chr(token) for token in np.asarray(dataset.get(i)).tolist())
        for i in range(len(dataset))
    ]


WRITTEN_BY_MEGATRON = [
    ("hf_eod", "HuggingFaceTokenizer", "hf_bpe", True),
    ("hf_plain", "HuggingFaceTokenizer", "hf_bpe", False),
    ("spm_eod", "SentencePieceTokenizer", "spm_unigram.model", True),
]


@pytest.mark.parametrize(
    ("name", "type", "model", "append_eod", "workers"),
    [  # seven workers divide the input alike, whatever they make of it
        pytest.param(*case, workers, marks=[pytest.mark.slow] * (workers == 7 and case[0] != "hf_eod"))
        for case in WRITTEN_BY_MEGATRON
        for workers in (1, 2, 7)
    ],
)
def test_bytes_equal_those_of_megatron(
    tmp_path: Path, workers: int, name: str, type: str, model: str, append_eod: bool
):
    notes: list[str] = []
    progress = encode_files(
        EncodeJob(
            inputs=(str(GOLDEN / "input.jsonl"),),
            output_prefix=str(tmp_path / name),
            tokenizer_type=type,
            tokenizer_model=str(GOLDEN / model),
            append_eod=append_eod,
            workers=workers,
        ),
        note=notes.append,
    )
    assert progress.documents == 200
    files = sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".json")
    assert files == [f"{name}_text_document.bin", f"{name}_text_document.idx"]
    assert [bool(note.startswith("fast tokenizer: equal on")) for note in notes] == [type == "HuggingFaceTokenizer"]
    for file in files:
        assert (tmp_path / file).read_bytes() == (GOLDEN / file).read_bytes()


def test_each_key_gets_a_pair_of_files(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"text": "ab", "title": "T"}\n\n{"title": "", "text": "c"}\n')
    encode_bytes(tmp_path, tmp_path / "in.jsonl", json_keys=("text", "title"), append_eod=True)
    assert texts(IndexedDataset(str(tmp_path / "out_text_document"))) == ["ab|", "c|"]
    titles = IndexedDataset(str(tmp_path / "out_title_document"))
    assert texts(titles) == ["T|"]
    assert titles.document_indices.tolist() == [0, 1, 1]


def test_text_files_and_folders(tmp_path: Path):
    data = tmp_path / "data"
    (data / "sub").mkdir(parents=True)
    (data / "b.txt").write_bytes(b"x\r\ny\n--\nz")
    (data / "sub" / "a.jsonl").write_text('{"text": "j"}')
    (data / "ignored.py").write_bytes(b"\xff")
    (data / "ignored.parquet.gz").write_text("pass")
    assert texts(encode_bytes(tmp_path, data)) == ["x\r\ny\n--\nz", "j"]
    assert texts(encode_bytes(tmp_path, data, split_on="\n--\n")) == ["x\r\ny", "z", "j"]
    assert texts(encode_bytes(tmp_path, data / "sub", data / "b.txt")) == ["j", "x\r\ny\n--\nz"]


BAD_LINE_BY_MESSAGE = {
    "not a line of JSON": b"{'text': 1}",
    "not UTF-8 at byte 10": b'{"text": "\xff"}',
    "a JSON object is wanted on each line, this is list": b'["text"]',
    "key \"text\" is missing; the keys are ['body']": b'{"body": "b"}',
    'key "text" holds NoneType, not text': b'{"text": null}',
    "the text cannot be encoded": b'{"text": "\\ud800"}',
}
# Found before and while it is encoded: what workers do with it. The others are left to --all.
BY_TWO_WORKERS = ("not a line of JSON", "the text cannot be encoded")


@pytest.mark.parametrize(
    ("workers", "message"),
    [
        *((1, message) for message in BAD_LINE_BY_MESSAGE),
        *(
            pytest.param(2, message, marks=[pytest.mark.slow] * (message not in BY_TWO_WORKERS))
            for message in BAD_LINE_BY_MESSAGE
        ),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path: Path, workers: int, message: str):
    source, line = tmp_path / "in.jsonl", BAD_LINE_BY_MESSAGE[message]
    source.write_bytes(b'{"text": "good"}\n' * 99 + line + b'\n{"text": "good"}\nworse')
    with pytest.raises(DataError) as caught:
        encode_bytes(tmp_path, source, workers=workers)
    assert str(caught.value).startswith(f"{source}:100: {message}")
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_an_input_without_text_is_refused(tmp_path: Path):
    (tmp_path / "in.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(DataError, match="1 documents and not one token"):
        encode_bytes(tmp_path, tmp_path / "in.jsonl")


def test_flags_that_cannot_work_are_refused(tmp_path: Path):
    (tmp_path / "in.txt").write_text("a")
    with pytest.raises(ConfigurationError, match="--workers 0 must be 1 or more"):
        encode_bytes(tmp_path, tmp_path / "in.txt", workers=0)
    with pytest.raises(ConfigurationError, match=r"the folder .*none does not exist"):
        encode_bytes(tmp_path / "none", tmp_path / "in.txt")


def run_tool(*arguments: str | Path) -> tuple[int, str]:
    """Exit code and last line of the standard error output."""
    result = subprocess.run([sys.executable, TOOL, *arguments], capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stderr.splitlines()[-1]


def test_the_program_and_its_exit_codes(tmp_path: Path):
    (tmp_path / "in.txt").write_text("abc")
    (tmp_path / "bad.jsonl").write_text("{")
    common = ["--output-prefix", tmp_path / "out", "--tokenizer-type", "ByteTokenizer"]
    code, last = run_tool("--input", tmp_path / "in.txt", *common)
    assert code == 0
    assert last.startswith("done: 1 documents, 0.0 MB, 3 tokens (")
    code, last = run_tool("--input", tmp_path / "bad.jsonl", *common)
    assert code == 65
    assert last.startswith(f"error: {tmp_path}/bad.jsonl:1: not a line of JSON")
    assert run_tool("--input", "none.txt", *common) == (64, "error: --input none.txt does not exist")
    code, last = run_tool("--inputs", "x", *common)
    assert (code, "--input" in last) == (64, True)


BAD_LINES = [b"{", b'{"text": "\xff"}', b'{"title": 1}', b'{"text": "\\ud800"}', b"[1]", b'{"text": 5}']


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("on_error", ["skip", "log"])
def test_bad_documents_are_left_out_and_counted(tmp_path: Path, workers: int, on_error: str):
    good = [b'{"text": "one\\u0000two"}', b'{"text": ""}', *[b'{"text": "%d"}' % n for n in range(500)]]
    lines = [*good[:2], *BAD_LINES[:3], *good[2:300], *BAD_LINES[3:], *good[300:]]
    (tmp_path / "good.jsonl").write_bytes(b"\n".join(good))
    (tmp_path / "bad.jsonl").write_bytes(b"\n".join(lines))
    for name, options in (("good", {}), ("bad", {"on_error": on_error, "workers": workers})):
        notes: list[str] = []
        job = EncodeJob((str(tmp_path / f"{name}.jsonl"),), str(tmp_path / name), "ByteTokenizer", **options)
        progress = encode_files(job, note=notes.append)
        assert (progress.documents, progress.skipped) == (len(good), 0 if name == "good" else len(BAD_LINES))
        assert progress.bytes_read == progress.bytes_total == (tmp_path / f"{name}.jsonl").stat().st_size
    for suffix in ("bin", "idx"):
        good_file, bad_file = (tmp_path / f"{name}_text_document.{suffix}" for name in ("good", "bad"))
        assert good_file.read_bytes() == bad_file.read_bytes()
    left_out = [note.split(": ")[1] for note in notes if note.startswith("left out")]
    numbers = [number for number, line in enumerate(lines, start=1) if line in BAD_LINES]
    assert left_out == ([f"{tmp_path}/bad.jsonl:{number}" for number in numbers] if on_error == "log" else [])
    assert json.loads((tmp_path / "bad_manifest.json").read_text())["skipped"] == len(BAD_LINES)


def test_a_worker_of_its_own_encodes_as_was_chosen():
    """The fast encoder may have been found to differ, although nothing forbids it."""
    job = EncodeJob((), "out", "HuggingFaceTokenizer", str(GOLDEN / "hf_bpe"))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(GOLDEN / "hf_bpe"))
    fast, plain = (preprocess._start_worker(job, is_fast=is_fast) for is_fast in (True, False))
    assert isinstance(fast, BlockEncoder)
    assert isinstance(plain, BlockEncoder)
    assert type(fast._encoder) is type(fast_encoder(tokenizer))
    assert type(plain._encoder) is type(plain_encoder(tokenizer)) is not type(fast._encoder)


def test_the_manifest_says_what_the_files_were_made_of(tmp_path: Path):
    (tmp_path / "other.jsonl").write_text('{"text": "another"}\n\n')
    inputs = [str(GOLDEN / "input.jsonl"), str(tmp_path / "other.jsonl")]
    model = str(GOLDEN / "hf_bpe")
    encode_files(EncodeJob(tuple(inputs), str(tmp_path / "a"), "HuggingFaceTokenizer", model, append_eod=True))
    manifest = json.loads((tmp_path / "a_manifest.json").read_text())
    assert manifest["inputs"] == [
        {"path": path, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        for path in inputs
        if (content := Path(path).read_bytes())
    ]
    assert manifest["tokenizer"]["type"] == "HuggingFaceTokenizer"
    assert (manifest["documents"], manifest["skipped"]) == (201, 0)
    size = (tmp_path / "a_text_document.bin").stat().st_size
    assert manifest["tokens"] == size // 2
    assert manifest["outputs"][str(tmp_path / "a_text_document")]["token_bytes"] == size


@pytest.mark.usefixtures("long_from")
def test_ends_of_long_and_of_short_documents(tmp_path: Path):
    chooser = random.Random(3)
    texts = ["x" * chooser.choice((0, 0, 1, 2, 700)) for _ in range(300)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    encode_files(EncodeJob((str(tmp_path / "in.jsonl"),), str(tmp_path / "out"), "ByteTokenizer", append_eod=True))
    expected = [token for text in texts if text for token in (*text.encode(), 256)]
    assert np.fromfile(tmp_path / "out_text_document.bin", np.uint16).tolist() == expected


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    ("kind", "model"), [("SentencePieceTokenizer", "spm_unigram.model"), ("HuggingFaceTokenizer", "hf_bpe")]
)
def test_a_lone_surrogate_is_named_whatever_the_tokenizer(tmp_path: Path, kind: str, model: str, fast: bool):
    (tmp_path / "in.jsonl").write_bytes(b'{"text": "good"}\n{"text": "a \\ud800 b"}\n')
    job = EncodeJob(
        (str(tmp_path / "in.jsonl"),), str(tmp_path / "out"), kind, str(GOLDEN / model), fast_tokenizer=fast
    )
    with pytest.raises(DataError, match=r"in\.jsonl:2: the text cannot be encoded: .*surrogates not allowed"):
        encode_files(job)


def test_the_plain_encoder_gives_the_ids_of_the_tokenizer(tmp_path: Path):
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(GOLDEN / "spm_unigram.model"))
    encode_plainly = plain_encoder(tokenizer)
    for text in probe_texts(tokenizer, 300, 21):
        assert encode_plainly([text])[0].tolist() == tokenizer.encode(text)


def _block(lines: list[bytes], first: int = 1) -> Block:
    content = b"".join(line + b"\n" for line in lines)
    return Block("in.jsonl", first, content, len(content), ReadPosition(0, len(content), first + len(lines)), 99)


class Bytes(ByteTokenizer):
    """Bytes with a vocabulary of any size."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size


def _encoder(
    on_error: Any = "fail", vocab_size: int = 257, keys: Any = ("text",), append_eod: bool = False
) -> BlockEncoder:
    return BlockEncoder(Bytes(vocab_size), plain_encoder(ByteTokenizer()), keys, append_eod, on_error)


TEN = [b'{"text": "a%d"}' % number for number in range(10)]


def test_the_first_of_several_bad_documents_is_named():
    """Line 9 before line 10, whether it cannot be read or cannot be encoded."""
    unread, surrogate = b'{"other": 1}', b'{"text": "\\ud800"}'
    for bad in ((unread, surrogate), (surrogate, unread), (surrogate, surrogate), (unread, unread)):
        block = _block([*TEN[:8], *bad])
        with pytest.raises(DataError, match=r"^in\.jsonl:9: "):
            _encoder()(block)
        problems = _encoder("skip")(block).problems
        assert [problem.split(": ")[0] for problem in problems] == ["in.jsonl:9", "in.jsonl:10"]
        assert _encoder("skip")(block).documents == 8


@pytest.mark.parametrize(("vocab_size", "taken"), [(98, False), (99, True)])
def test_ids_are_below_the_vocabularys_size(vocab_size: int, taken: bool):
    block = _block([b'{"text": "ab"}'])
    if taken:
        assert _encoder(vocab_size=vocab_size)(block).columns[0][0].tolist() == [97, 98]
        return
    with pytest.raises(DataError, match=r"^in\.jsonl:1: token ids from 97 to 98 do not fit a vocabulary of 98$"):
        _encoder(vocab_size=vocab_size)(block)


@pytest.mark.usefixtures("long_from")
@pytest.mark.parametrize("append_eod", [False, True])
def test_tokens_of_each_column_and_document(append_eod: bool):
    """In the dtype of the vocabulary; a document without tokens gets no end either."""
    block = _block([b'{"text": "ab", "title": ""}', b'{"text": "", "title": "x"}', b'{"text": "c", "title": "yz"}'])
    found = _encoder(keys=("text", "title"), append_eod=append_eod)(block)
    end = [256] if append_eod else []
    texts_, titles = found.columns
    assert texts_[0].tolist() == [97, 98, *end, 99, *end]
    assert texts_[1].tolist() == [2 + append_eod, 0, 1 + append_eod]
    assert titles[0].tolist() == [120, *end, 121, 122, *end]
    assert {tokens.dtype for tokens, _ in found.columns} == {np.dtype(np.uint16)}
    assert (found.documents, found.bytes_read, found.text_bytes, found.problems) == (3, 99, block.size, [])
    wide = _encoder(vocab_size=65500)(_block(TEN[:1]))
    assert wide.columns[0][0].dtype == np.int32


@pytest.mark.parametrize("length", [5, 1023, 1024, 1025, 5000])
def test_a_sample_is_a_text_and_the_ids_that_were_written(length: int):
    """Of documents and columns that change from block to block; of a long one its beginning."""
    seen = set()
    for first in range(1, 40):
        fields = [{"text": f"{n}t" + "x" * length, "title": f"{n}b" + "y" * length} for n in range(3)]
        block = _block([json.dumps(one).encode() for one in fields], first)
        sample = _encoder(keys=("text", "title"))(block).sample
        assert sample is not None
        assert sample.ids == list(sample.text.encode())
        assert sample.text in [value[:1024] for one in fields for value in one.values()]
        seen.add(sample.text[:2])
    assert {one[0] for one in seen} == {"0", "1", "2"}
    assert {one[1] for one in seen} == {"t", "b"}
    assert _encoder("skip")(_block([b"1"])).sample is None


def test_a_full_disk_is_said_with_the_file_and_what_is_needed(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": "abcdefgh" * 50}) + "\n" for _ in range(500)))
    file = tmp_path / "out_text_document.bin"
    with files_up_to(100_000), pytest.raises(StorageError) as caught:
        encode_bytes(tmp_path, corpus)
    said = rf"^{file} cannot be written: File too large\. The tokens need about ([\d,]+) bytes in all\. Free space, or "
    match = re.match(said, str(caught.value))
    assert match, caught.value
    assert int(match[1].replace(",", "")) == pytest.approx(2 * 8 * 50 * 500, rel=0.1)
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def test_workers_are_no_more_than_the_cores_can_use(tmp_path: Path):
    (tmp_path / "in.txt").write_text("one text")
    notes: list[str] = []
    job = EncodeJob((str(tmp_path / "in.txt"),), str(tmp_path / "out"), "ByteTokenizer", workers=10**9)
    assert encode_files(job, note=notes.append).documents == 1
    most = 8 * len(os.sched_getaffinity(0))
    assert notes[0] == f"--workers 1000000000: {most} are used, 8 for each core here"


def test_workers_are_no_more_than_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "in.jsonl").write_text(json.dumps({"text": "x" * 900}) + "\n")
    (tmp_path / "three.jsonl").write_text((json.dumps({"text": "x" * 900}) + "\n") * 3)
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1000)
    made: list[int] = []

    def pool(workers: int, *others: Any, **named: Any) -> ProcessPoolExecutor:
        made.append(workers)
        return ProcessPoolExecutor(workers, *others, **named)

    monkeypatch.setattr(encode, "ProcessPoolExecutor", pool)
    for name, workers, processes in (("in", 9, 1), ("three", 9, 3), ("three", 2, 2)):
        assert len(encode_bytes(tmp_path, tmp_path / f"{name}.jsonl", workers=workers)) == (3 if name == "three" else 1)
        assert made.pop() == processes
