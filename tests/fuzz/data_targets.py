"""Texts, tokenizers, .bin/.idx pairs and metrics, as targets of the fuzzer (`targets.py`)."""

import bz2
import gzip
import json
import lzma
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ext.data.data_manifest import checksums, first_damage, known_blocks
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import check_indexed_files, check_token_ids, open_index
from megatron_ext.errors import DataError
from megatron_ext.plugins.pages.comparison import read_runs, results
from megatron_ext.plugins.pages.loss_curve import RunHistory, loss_chart, read_history
from megatron_ext.plugins.pages.run_page import run_page, runs_page
from megatron_ext.plugins.prepare.documents import read_documents
from megatron_ext.plugins.prepare.inputs import find_files
from megatron_ext.telemetry.commands_file import NAME, starts
from megatron_ext.tokenizer.from_flags import build_tokenizer
from tests.fuzz.mutations import Read, changed, flipped
from tests.support.pages import elements


def pair(folder: Path) -> Read:
    """A .bin/.idx pair with its manifest: what is taken is what was written."""
    prefix = str(folder / "x_text_document")
    tokens = (np.arange(3000) % 61).astype(np.uint16)
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(tokens.tobytes(), [30] * 100)
    whole = {suffix: Path(prefix + suffix).read_bytes() for suffix in (".bin", ".idx")}
    outputs = {prefix: {"token_bytes": 6000}}
    content = {"tokenizer": {}, "outputs": outputs, "checksums": checksums([prefix], 1024)}
    said = json.dumps(content).encode()

    def read(chance: random.Random) -> None:
        which = chance.choice((".bin", ".idx", "manifest"))
        for suffix, bytes_ in whole.items():
            Path(prefix + suffix).write_bytes(changed(bytes_, chance) if which == suffix else bytes_)
        text = changed(said, chance) if which == "manifest" else said
        (folder / "x_text_document_manifest.json").write_bytes(text)
        check_indexed_files(prefix)
        check_token_ids(prefix, 61)
        arrays = open_index(prefix)
        ends = arrays.pointers + arrays.lengths.astype(np.int64) * arrays.dtype.itemsize
        assert (arrays.pointers[1:] == ends[:-1]).all()
        assert int(ends[-1]) == Path(prefix + ".bin").stat().st_size
        found = first_damage(known_blocks(prefix))
        if found is not None:
            raise DataError(found)
        if which != "manifest":
            assert all(Path(prefix + suffix).read_bytes() == bytes_ for suffix, bytes_ in whole.items())

    return read


def bin_bits(folder: Path) -> Read:
    """A single bit of the tokens: always found."""
    prefix = str(folder / "x")
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(bytes(6000), [30] * 100)
    whole = Path(prefix + ".bin").read_bytes()
    content = {"tokenizer": {}, "outputs": {prefix: {"token_bytes": 6000}}, "checksums": checksums([prefix], 1024)}
    (folder / "x_manifest.json").write_text(json.dumps(content))

    def read(chance: random.Random) -> None:
        Path(prefix + ".bin").write_bytes(flipped(whole, chance))
        found = first_damage(known_blocks(prefix))
        assert found is not None, "a changed bit was not found"
        raise DataError(found)

    return read


_LINES = b"".join(
    json.dumps({"text": f"document {n} é \u6f22 \U0001f600", "id": n, "more": {"a": [n]}}).encode() + b"\n"
    for n in range(20)
)


def _zst(content: bytes) -> bytes:
    from backports import zstd

    return zstd.compress(content)


_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda content: content,
    ".gz": lambda content: gzip.compress(content, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": _zst,
}


def jsonl(folder: Path) -> Read:
    """JSON lines, plain and compressed: what is taken is what json reads of each line."""
    compressed = {suffix: make(_LINES) for suffix, make in _COMPRESS.items()}

    def read(chance: random.Random) -> None:
        suffix = chance.choice(list(compressed))
        inside = chance.random() < 0.5
        content = _COMPRESS[suffix](changed(_LINES, chance)) if inside else changed(compressed[suffix], chance)
        path = folder / f"x.jsonl{suffix}"
        path.write_bytes(content)
        for record in read_documents(find_files([str(path)])):
            [text] = record.texts(["text"])
            assert isinstance(record.payload, memoryview | bytes)
            assert json.loads(bytes(record.payload))["text"] == text

    return read


def text_file(folder: Path) -> Read:
    """A text file, compressed."""

    def read(chance: random.Random) -> None:
        path = folder / "x.txt.gz"
        path.write_bytes(changed(gzip.compress(_LINES, mtime=0), chance))
        [record] = read_documents(find_files([str(path)]))
        assert zlib.crc32(str(record.texts(["text"])[0]).encode()) == zlib.crc32(_LINES), "damage was not found"

    return read


def parquet(folder: Path) -> Read:
    """A parquet file."""
    import pyarrow
    import pyarrow.parquet

    path = folder / "x.parquet"
    rows = [f"document {n} é" for n in range(50)]
    pyarrow.parquet.write_table(pyarrow.table({"text": rows, "id": list(range(50))}), path, row_group_size=20)
    whole = path.read_bytes()

    def read(chance: random.Random) -> None:
        path.write_bytes(changed(whole, chance))
        for record in read_documents(find_files([str(path)])):
            assert isinstance(record.texts(["text"])[0], str | bytes)

    return read


def tokenizer(folder: Path) -> Read:
    """The files of a Hugging Face tokenizer."""
    vocabulary = {"<eod>": 0, **{chr(97 + n): n + 1 for n in range(26)}, "ab": 27}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]]}
    token = {"content": "<eod>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    added = [{"id": 0, "special": True, **token}]
    files: dict[str, Any] = {
        "tokenizer.json": {"version": "1.0", "added_tokens": added, "model": model},
        "tokenizer_config.json": {"eos_token": "<eod>", "added_tokens_decoder": {"0": token}},
    }
    texts = {name: json.dumps(content).encode() for name, content in files.items()}

    def read(chance: random.Random) -> None:
        target = chance.choice(list(texts))
        for name, text in texts.items():
            (folder / name).write_bytes(changed(text, chance) if name == target else text)
        made = build_tokenizer("HuggingFaceTokenizer", str(folder))
        assert made.vocab_size > 0

    return read


def tiktoken(folder: Path) -> Read:
    """A tiktoken vocabulary in JSON."""
    import base64

    entries = [{"rank": n, "token_bytes": base64.b64encode(bytes([n])).decode()} for n in range(256)]
    whole = json.dumps(entries).encode()
    path = folder / "tokens.json"

    def read(chance: random.Random) -> None:
        path.write_bytes(changed(whole, chance))
        assert build_tokenizer("TikTokenizer", str(path), 1256).vocab_size

    return read


def metrics(folder: Path) -> Read:
    """A metrics file: what is taken can be shown, in the terminal and as a page."""
    step = {"consumed_tokens": 8, "grad_norm": 1.5, "tokens_per_second": 1e3}
    others: list[dict[str, Any]] = [
        {"validation_loss": 2.5},
        {"tasks": {"cloze": {"accuracy": 0.5, "examples": 3}}},
        {"samples": [{"prompt": "a", "text": "b"}]},
        {"lm_loss": 2.5, **step, "slowest_rank": {"rank": 1, "ratio": 1.25, "slow": [1]}},
    ]
    steps = [{"iteration": n, "lm_loss": 1 / (n + 1), **step} for n in range(6)]
    rows = [*steps, *({"iteration": 6, **other} for other in others)]
    whole = b"".join(json.dumps(row).encode() + b"\n" for row in rows)

    def read(chance: random.Random) -> None:
        (folder / "m.jsonl").write_bytes(changed(whole, chance))
        history = read_history(folder / "m.jsonl")
        assert loss_chart(history)
        assert elements(run_page(history, "run"))
        runs = read_runs([folder / "m.jsonl"] * 2)
        assert results(runs)
        assert elements(runs_page({run.title: run.history for run in runs}, by_tokens=True))

    return read


def commands(folder: Path) -> Read:
    """The record of a run's starts: what is taken stands on its page."""
    rows = [{"time": "2026-11-29T17:30:14+00:00", "ranks": n, "command": "megatron-ext pretrain"} for n in range(3)]
    whole = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    history = RunHistory([{"iteration": 1, "lm_loss": 1.0}], [])

    def read(chance: random.Random) -> None:
        (folder / NAME).write_bytes(changed(whole, chance))
        assert elements(run_page(history, "run", starts=starts(folder)))

    return read
