import bz2
import gzip
import hashlib
import json
import lzma
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_ext.errors import ConfigurationError, DataError, MemoryExhaustedError
from megatron_ext.plugins.prepare import documents, inputs, parquet
from megatron_ext.plugins.prepare.documents import InputHashes, RawDocument, ReadPosition, read_blocks
from megatron_ext.plugins.prepare.inputs import find_files, zstd_module

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


@pytest.fixture
def short_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MOST_RECORD", 3000)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a table are read 128 at a time, and handed on where they are more than 250 bytes."""
    monkeypatch.setattr(parquet, "_ROWS", 128)
    monkeypatch.setattr(parquet, "_BLOCK_BYTES", 250)


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


def test_a_damaged_parquet_file_is_named(tmp_path: Path):
    path = tmp_path / "in.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", "b"]}), path)
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
        assert resumed.of_files.items() <= hashes.of_files.items()
        assert 1 in resumed.of_files
    *_, last = read_blocks(files, ("text",), split_on, ReadPosition(1))
    assert last.bytes_read == blocks[-1].bytes_read == (tmp_path / name).stat().st_size + len(b"one--two")


@pytest.mark.usefixtures("small_blocks")
def test_pieces_of_a_text_file_are_numbered(tmp_path: Path):
    (tmp_path / "in.txt").write_bytes(b"a<>" + b"b" * 5000 + b"<><>c" + b"<" * 995 + b"<>")
    pieces = [(record.position, record.payload) for record in records(tmp_path / "in.txt", split_on="<>")]
    assert pieces == [(1, b"a"), (2, b"b" * 5000), (4, b"c" + b"<" * 995)]
    (tmp_path / "in.txt").write_bytes(b"")
    assert records(tmp_path / "in.txt", split_on="<>") == []
    assert [record.payload for record in records(tmp_path / "in.txt")] == [b""]


def test_standard_input_gives_the_bytes_of_a_file(tmp_path: Path):
    tool = Path(__file__).parents[3] / "tools" / "preprocess_data.py"
    common = ["--tokenizer-type", "ByteTokenizer", "--output-prefix"]
    subprocess.run([sys.executable, tool, "--input", "-", *common, tmp_path / "a"], input=LINES, check=True)
    (tmp_path / "in.jsonl").write_bytes(LINES)
    subprocess.run([sys.executable, tool, "--input", tmp_path / "in.jsonl", *common, tmp_path / "b"], check=True)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"a_text_document.{suffix}").read_bytes() == (
            tmp_path / f"b_text_document.{suffix}"
        ).read_bytes()


def test_standard_input_stays_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It is the process's, which may have more to read from it."""
    (tmp_path / "in").write_bytes(LINES)
    with open(tmp_path / "in") as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        [file] = find_files(["-"])
        with inputs.open_input(file) as (source, _):
            assert source.read() == LINES
        assert not stdin.buffer.closed


def test_lines_that_the_fast_json_reader_refuses_are_read_by_the_exact_one():
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
    assert hashes.of_files == {0: (hashlib.sha256(packed).hexdigest(), len(packed))}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("separator", ["<>", "é", "数数"])
def test_reading_goes_on_behind_any_block_for_every_separator(tmp_path: Path, separator: str):
    """A separator has more bytes than characters; empty pieces are counted and are no documents."""
    pieces = [b"a" * 300, b"", b"b" * 900, "ü".encode() * 40, b"", b"c", b"d" * 2500, b"end"]
    (tmp_path / "in.txt").write_bytes(separator.encode().join(pieces))
    expected = [(number, piece) for number, piece in enumerate(pieces, 1) if piece]
    files = find_files([str(tmp_path / "in.txt")])
    blocks = list(read_blocks(files, ("text",), separator))
    for count in range(len(blocks) + 1):
        start = blocks[count - 1].end if count else ReadPosition()
        before = [record for block in blocks[:count] for record in block.documents()]
        rest = [record for block in read_blocks(files, ("text",), separator, start) for record in block.documents()]
        assert [(record.position, record.payload) for record in before + rest] == expected
    assert len(blocks) > 3


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("start", [0, 1, 299, 300, 301, 555, 599, 600, 601, 999, 1000])
def test_tables_are_read_from_any_row_on(tmp_path: Path, kind: str, start: int):
    """In blocks that say how far they are, of groups of 300 rows that are read 128 at a time."""
    table = pyarrow.table({"text": [f"row {number}" for number in range(1000)], "id": list(range(1000))})
    path = tmp_path / f"in.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=300)
    else:
        with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    [file] = find_files([str(path)])
    assert parquet.row_count(file) == 1000
    found = list(parquet.read_rows(file, ["text"], start))
    assert [row for rows, _, _ in found for row in rows] == [{"text": f"row {n}"} for n in range(start, 1000)]
    assert [first for _, first, _ in found] == [
        start + sum(len(rows) for rows, _, _ in found[:n]) for n in range(len(found))
    ]
    assert all(0 < len(rows) <= 128 for rows, _, _ in found)
    blocks = list(read_blocks([file], ["text"], start=ReadPosition(0, start, start + 1)))
    ends = [(block.end.offset, block.end.position) for block in blocks]
    assert ends == [(first + len(rows), first + len(rows) + 1) for rows, first, _ in found]
    assert [record.position for block in blocks for record in block.documents()] == list(range(start + 1, 1001))
    size = path.stat().st_size
    assert [block.bytes_read for block in blocks] == [size * offset // 1000 for offset, _ in ends]


def test_a_table_without_rows(tmp_path: Path):
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], "string")}), tmp_path / "in.parquet")
    assert records(tmp_path / "in.parquet") == []


@pytest.mark.usefixtures("few_rows")
def test_long_rows_are_handed_on_a_few_at_a_time(tmp_path: Path):
    """As soon as they are more than a block; the last ones whatever they are."""
    texts = ["x" * 100] * 7
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "none": [None] * 7}), tmp_path / "in.parquet")
    [file] = find_files([str(tmp_path / "in.parquet")])
    found = list(parquet.read_rows(file, ["text"]))
    assert [(len(rows), first) for rows, first, _ in found] == [(3, 0), (3, 3), (1, 6)]
    assert len({size for _, _, size in found[:2]}) == 1
    assert found[2][2] < found[0][2]


@pytest.mark.parametrize(
    ("columns", "all_needed", "present"),
    [
        (["text"], True, ["text"]),
        (["text", "id"], True, ["id", "text"]),
        (["text", "none"], True, None),
        (["text", "none"], False, ["text"]),
        (["none", "nor"], False, None),
    ],
)
def test_missing_columns_are_named(tmp_path: Path, columns: list[str], all_needed: bool, present: list[str] | None):
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "text": ["a"]}), tmp_path / "in.parquet")
    [file] = find_files([str(tmp_path / "in.parquet")])
    if present is None:
        with pytest.raises(DataError, match=r'no column "none"; the columns are'):
            list(parquet.read_rows(file, columns, needs_all_columns=all_needed))
        return
    [([row], _, _)] = parquet.read_rows(file, columns, needs_all_columns=all_needed)
    assert sorted(row) == present


def test_blank_lines_are_counted_and_hold_nothing(tmp_path: Path):
    (tmp_path / "in.jsonl").write_bytes(b'\n{"text": "a"}\n \t\n\n {"text": "b"}\nx\n\n')
    found = [(record.position, bytes(record.payload)) for record in records(tmp_path / "in.jsonl")]  # type: ignore[arg-type]
    assert found == [(2, b'{"text": "a"}'), (5, b' {"text": "b"}'), (6, b"x")]


@pytest.mark.usefixtures("small_blocks", "short_records")
@pytest.mark.parametrize(("over", "taken"), [(0, True), (1, False)])
@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "pieces.txt"])
def test_a_record_over_the_largest_size_is_named(tmp_path: Path, over: int, taken: bool, name: str):
    line = b'{"text": "%s"}' % (b"x" * (3000 - 12 + over))
    assert len(line) == 3000 + over
    (tmp_path / name).write_bytes(line)
    split_on = "--" if name == "pieces.txt" else None
    if taken:
        assert [len(record.payload) for record in records(tmp_path / name, split_on=split_on)] == [3000]
        return
    what = "line" if name == "in.jsonl" else "text"
    with pytest.raises(DataError, match=rf"{name}:1: a {what} of more than 3,000 bytes, which is no document"):
        records(tmp_path / name, split_on=split_on)


def test_a_key_without_text_is_named_with_the_keys_of_the_record():
    """Twenty of them at most, by name, each of a hundred characters at most."""
    fields = {f"k{number:02}": number for number in range(23)}
    with pytest.raises(DataError) as caught:
        RawDocument("f", 7, json.dumps(fields).encode(), is_json=True).texts(["k05"])
    names = [f"k{number:02}" for number in range(20)]
    assert str(caught.value) == f'f:7: key "k05" holds int, not text; the keys are {names}, and 3 more (--json-keys)'
    with pytest.raises(DataError) as caught:
        RawDocument("f", 7, json.dumps({"x" * 200: "a"}).encode(), is_json=True).texts(["text"])
    assert str(caught.value) == f'f:7: key "text" is missing; the keys are {["x" * 100]} (--json-keys)'
    plain = RawDocument("f", 7, b'{"text": "a"}', is_json=False)
    assert plain.texts(["one", "two"]) == ['{"text": "a"}'] * 2
    with pytest.raises(DataError, match=r"^f:7: a text file has no fields"):
        plain.fields()
    for is_json in (True, False):
        with pytest.raises(
            DataError, match=r"^f:7: not UTF-8 at byte 2: invalid start byte; convert .* with --on-error skip$"
        ):
            RawDocument("f", 7, b"ab\xff", is_json=is_json).texts(["text"])


def test_folders_and_patterns_find_files_in_the_order_of_their_paths(tmp_path: Path):
    """Files below a folder and by patterns by their path; a file whose name has a pattern's signs is itself."""
    for name in (
        "b/x.jsonl",
        "a/y.txt.gz",
        "a/z.arrow.gz",
        "c.parquet.zst",
        "a/deep/w.arrow",
        "d[1].jsonl",
        "d1.jsonl",
        "e.md",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(b"")

    def found(name: str) -> list[tuple[str, str, str]]:
        files = find_files([str(tmp_path / name)])
        return [(str(Path(file.path).relative_to(tmp_path)), file.kind, file.compression) for file in files]

    assert found("") == [
        ("a/deep/w.arrow", "arrow", ""),
        ("a/y.txt.gz", "text", ".gz"),
        ("b/x.jsonl", "json", ""),
        ("d1.jsonl", "json", ""),
        ("d[1].jsonl", "json", ""),
        ("e.md", "text", ""),
    ]
    assert [name for name, _, _ in found("**/*.jsonl")] == ["b/x.jsonl", "d1.jsonl", "d[1].jsonl"]
    assert found("d[1].jsonl") == [("d[1].jsonl", "json", "")]
    both = find_files([str(tmp_path / "d*.jsonl"), str(tmp_path)])
    assert [file.path for file in both] == [
        file.path for name in ("d*.jsonl", "") for file in find_files([str(tmp_path / name)])
    ]
    with pytest.raises(ConfigurationError, match=r"nothing\*\.jsonl does not exist"):
        found("nothing*.jsonl")
    for name in ("a/z.arrow.gz", "c.parquet.zst"):
        with pytest.raises(ConfigurationError, match="the name of an input must end in one of"):
            found(name)
    (tmp_path / "folder.jsonl").mkdir()
    assert len(found("")) == 6
    with pytest.raises(ConfigurationError, match=r"folder\.jsonl is a folder with no \.jsonl, \.json, "):
        found("folder.jsonl")


@pytest.mark.parametrize("window", [27, 28, 31])
def test_a_zstd_file_of_a_large_window(tmp_path: Path, window: int):
    """As `zstd --long=31` writes it."""
    zstd = zstd_module("in.jsonl.zst")
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: window})
    line = b'{"text": "long"}\n'
    (tmp_path / "in.jsonl.zst").write_bytes(compressor.compress(line * 1000) + compressor.flush())
    with inputs.open_input(find_files([str(tmp_path / "in.jsonl.zst")])[0]) as (stream, _):
        assert stream.read() == line * 1000


def test_a_window_that_does_not_fit_in_memory_is_no_damage(tmp_path: Path):
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 31})
    (tmp_path / "in.jsonl.zst").write_bytes(compressor.compress(LINES) + compressor.flush())
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), limits[1]))
    try:
        with pytest.raises(MemoryExhaustedError, match=r"in\.jsonl\.zst: memory has run out while it was decompressed"):
            records(tmp_path / "in.jsonl.zst")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert len(records(tmp_path / "in.jsonl.zst")) == 3000


def test_a_folder_is_read_by_content_and_what_is_left_out_is_said(tmp_path: Path):
    """The text of another name is a document; most of the bytes are never left out unasked."""
    for number in range(247):
        (tmp_path / f"{number:03}.py").write_text(f"x = {number}  # é\n" * 20)
    for name in ("a.txt", "b.md", "Makefile"):
        (tmp_path / name).write_text("text\n")
    (tmp_path / "c.png").write_bytes(b"\x89PNG\xff" * 100)
    (tmp_path / "d.dat").write_bytes(b"\0" * 100)
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "HEAD").write_text("ref")
    notes: list[str] = []
    files = find_files([str(tmp_path)], note=notes.append)
    assert len(files) == 250
    assert {file.kind for file in files} == {"text"}
    left_out = "left out: 1 hidden, 1 .png (not UTF-8), 1 .dat (not text)"
    assert notes == [f"--input {tmp_path}: read 250 of 253 files; {left_out}"]

    files = find_files([str(tmp_path)], [".txt", ".md"], notes.append)
    assert [Path(file.path).name for file in files] == ["a.txt", "b.md"]
    assert "read 2 of 253 files; left out: 247 .py (not of --extensions)," in notes[1]
    with pytest.raises(ConfigurationError, match="no other text whose name ends in"):
        find_files([str(tmp_path)], [".c", ".h"])

    (tmp_path / "c.png").write_bytes(b"\x89PNG\xff" * 100_000)
    with pytest.raises(ConfigurationError, match="--extensions") as error:
        find_files([str(tmp_path)])
    asked = str(error.value).partition("--extensions ")[2].partition(" to go on")[0].split()
    assert len(find_files([str(tmp_path)], asked)) == 250


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_an_empty_compressed_file_is_damaged(tmp_path: Path, suffix: str):
    (tmp_path / f"in.jsonl.{suffix}").write_bytes(b"")
    with pytest.raises(DataError, match=r"damaged or ends too soon, at or before byte 0: it is empty\. Copy the file"):
        records(tmp_path / f"in.jsonl.{suffix}")


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("number", [None, 5])
def test_an_error_of_the_disk_is_no_damage(
    tmp_path: Path, compressed: bool, number: int | None, monkeypatch: pytest.MonkeyPatch
):
    """bz2 names damage by an OSError without a number."""
    name = "in.jsonl.bz2" if compressed else "in.jsonl"
    (tmp_path / name).write_bytes(bz2.compress(LINES) if compressed else LINES)

    def readinto(reader: Any, buffer: Any) -> int:
        raise OSError("odd") if number is None else OSError(number, "Input/output error")

    monkeypatch.setattr(inputs.HashingReader, "readinto", readinto)
    damaged = compressed and number is None
    with pytest.raises(DataError if damaged else OSError) as caught:
        records(tmp_path / name)
    assert isinstance(caught.value, DataError) == damaged
