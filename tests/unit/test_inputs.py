import bz2
import gzip
import hashlib
import json
import lzma
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from megatron_ext.data.prepare import documents
from megatron_ext.data.prepare.documents import InputHashes, RawDocument, ReadPosition, read_blocks
from megatron_ext.data.prepare.inputs import find_files, zstd_module
from megatron_ext.errors import ConfigurationError, DataError

zstd = zstd_module("test")
LINES = b"".join(json.dumps({"text": f"line {n} " + "é" * (n % 50)}).encode() + b"\n" for n in range(3000))
COMPRESSORS = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "bz2": bz2.compress,
    "zst": zstd.compress,
}


def records(*paths: Path | str, split_on: str | None = None, start: ReadPosition | None = None) -> list[RawDocument]:
    files = find_files([str(path) for path in paths])
    blocks = read_blocks(files, ("text",), split_on, start or ReadPosition())
    return [record for block in blocks for record in block.documents()]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", 1000)


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_files_hold_the_same_lines(tmp_path: Path, suffix: str):
    plain, packed = tmp_path / "in.jsonl", tmp_path / f"in.jsonl.{suffix}"
    plain.write_bytes(LINES)
    compress = COMPRESSORS[suffix]
    packed.write_bytes(compress(LINES[:50_000]) + compress(LINES[50_000:]))  # two members, as `cat a b` makes them
    expected = [(record.position, record.payload) for record in records(plain)]
    assert len(expected) == 3000
    assert [(record.position, record.payload) for record in records(packed)] == expected


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damaged_compression_is_named(tmp_path: Path, suffix: str, damage: str):
    data = bytearray(COMPRESSORS[suffix](LINES))
    if damage == "truncated":
        del data[-10:]
    else:
        data[len(data) // 2] ^= 0x55
        data[len(data) // 2 + 1] ^= 0x55
    packed = tmp_path / f"in.jsonl.{suffix}"
    packed.write_bytes(data)
    with pytest.raises(DataError, match=rf"in\.jsonl\.{suffix}: the compressed data is damaged or ends too soon"):
        records(packed)


def test_parquet_rows(tmp_path: Path):
    path = tmp_path / "in.parquet"
    texts = [f"row {n}" for n in range(1000)]
    table = pyarrow.table({"id": list(range(1000)), "text": texts})
    pyarrow.parquet.write_table(table, path, row_group_size=300)
    found = records(path)
    assert [record.texts(["text"]) for record in found] == [[text] for text in texts]
    assert [record.position for record in found] == list(range(1, 1001))
    for rows in (0, 1, 299, 300, 555, 1000):
        rest = records(path, start=ReadPosition(0, rows, rows + 1))
        assert [record.position for record in rest] == list(range(rows + 1, 1001))
    with pytest.raises(DataError, match=r"no column \"body\"; the columns are \['id', 'text'\]"):
        list(read_blocks(find_files([str(path)]), ("body",)))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(DataError, match=r"in\.parquet: not a readable parquet file"):
        records(path)


def test_a_parquet_row_without_text(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "in.parquet")
    with pytest.raises(DataError, match=r'in\.parquet:2: key "text" holds NoneType, not text'):
        [record.texts(["text"]) for record in records(tmp_path / "in.parquet")]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["in.jsonl", "in.jsonl.gz", "in.txt", "whole.txt"])
def test_reading_goes_on_behind_any_block(tmp_path: Path, name: str):
    data = LINES[:20_000].replace(b"\n", b"--") if name == "in.txt" else LINES[:20_000]
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    (tmp_path / "next.txt").write_bytes(b"one--two")
    files = find_files([str(tmp_path / name), str(tmp_path / "next.txt")])
    split_on = None if name == "whole.txt" else "--"
    hashes = InputHashes()
    blocks = list(read_blocks(files, ("text",), split_on, hashes=hashes))
    assert len(blocks) > (1 if name == "whole.txt" else 10)
    whole = [record for block in blocks for record in block.documents()]
    for count in range(1, len(blocks) + 1):
        before = [record for block in blocks[:count] for record in block.documents()]
        resumed = InputHashes()
        rest = read_blocks(files, ("text",), split_on, blocks[count - 1].end, resumed)
        assert before + [record for block in rest for record in block.documents()] == whole
        assert resumed.found.items() <= hashes.found.items()
        assert 1 in resumed.found
    *_, last = read_blocks(files, ("text",), split_on, ReadPosition(1))
    assert last.bytes_read == blocks[-1].bytes_read == (tmp_path / name).stat().st_size + len(b"one--two")


@pytest.mark.usefixtures("small_blocks")
def test_pieces_and_their_numbers(tmp_path: Path):
    (tmp_path / "in.txt").write_bytes(b"a<>" + b"b" * 5000 + b"<><>c" + b"<" * 995 + b"<>")
    pieces = [(record.position, record.payload) for record in records(tmp_path / "in.txt", split_on="<>")]
    assert pieces == [(1, b"a"), (2, b"b" * 5000), (4, b"c" + b"<" * 995)]
    (tmp_path / "in.txt").write_bytes(b"")
    assert records(tmp_path / "in.txt", split_on="<>") == []
    assert [record.payload for record in records(tmp_path / "in.txt")] == [b""]


def test_patterns_and_folders_are_sorted(tmp_path: Path):
    for name in ("b.jsonl", "a.jsonl", "c.txt", "d.jsonl.zst", "e.md"):
        (tmp_path / name).write_bytes(b"")
    names = [Path(file.path).name for file in find_files([str(tmp_path / "*.jsonl"), str(tmp_path)])]
    assert names == ["a.jsonl", "b.jsonl", "a.jsonl", "b.jsonl", "c.txt", "d.jsonl.zst"]
    with pytest.raises(ConfigurationError, match=r"nothing\*\.jsonl does not exist"):
        find_files([str(tmp_path / "nothing*.jsonl")])


def test_standard_input(tmp_path: Path):
    tool = Path(__file__).parents[2] / "tools" / "preprocess_data.py"
    common = ["--tokenizer-type", "ByteTokenizer", "--output-prefix"]
    subprocess.run([sys.executable, tool, "--input", "-", *common, tmp_path / "a"], input=LINES, check=True)
    (tmp_path / "in.jsonl").write_bytes(LINES)
    subprocess.run([sys.executable, tool, "--input", tmp_path / "in.jsonl", *common, tmp_path / "b"], check=True)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"a_text_document.{suffix}").read_bytes() == (
            tmp_path / f"b_text_document.{suffix}"
        ).read_bytes()


def test_what_the_fast_json_reader_refuses_the_exact_one_judges():
    good = RawDocument("f", 1, b'{"text": "\\u00e9", "n": NaN}', is_json=True)
    assert good.texts(["text"]) == ["é"]
    assert RawDocument("f", 1, b'{"text": "a", "text": "b"}', is_json=True).texts(["text"]) == ["b"]
    lone = RawDocument("f", 1, b'{"text": "\\ud800"}', is_json=True)
    assert lone.texts(["text"]) == ["\ud800"]
    with pytest.raises(DataError, match="not a line of JSON"):
        RawDocument("f", 1, b'\xef\xbb\xbf{"text": "a"}', is_json=True).texts(["text"])


def test_the_hash_is_that_of_the_file_on_the_disk(tmp_path: Path):
    packed = gzip.compress(LINES) + bytes(100)  # padding behind the data, as tapes had it
    (tmp_path / "in.jsonl.gz").write_bytes(packed)
    hashes = InputHashes()
    list(read_blocks(find_files([str(tmp_path / "in.jsonl.gz")]), ("text",), hashes=hashes))
    assert hashes.found == {0: (hashlib.sha256(packed).hexdigest(), len(packed))}
