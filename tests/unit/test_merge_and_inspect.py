import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.inspect import Summary, document_tokens, summarize
from megatron_ext.data.integrity import check_token_ids
from megatron_ext.data.prepare.merge import Merged, find_prefixes, merge_indexed_files
from megatron_ext.errors import ConfigurationError, DataError

ROOT = Path(__file__).parents[2]


def write(prefix: Path, documents: list[list[int]], dtype: type[np.uint16] | type[np.int32] = np.uint16) -> str:
    with IndexedWriter(prefix, dtype) as writer:
        lengths = np.array([len(document) for document in documents])
        writer.add_tokens(np.array([token for document in documents for token in document], dtype).tobytes(), lengths)
    return str(prefix)


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    write(folder / "b", [[1, 2, 3], [], [4]])
    write(folder / "a", [[], [5, 6]])
    builder = IndexedDatasetBuilder(str(folder / "c.bin"), np.uint16)  # documents of several sequences, as Megatron has
    for lengths in ([2, 1], [3]):
        builder.add_document(np.arange(sum(lengths), dtype=np.uint16), lengths)  # type: ignore[arg-type]
    builder.finalize(str(folder / "c.idx"))
    return folder


def run_tool(name: str, *arguments: str | Path) -> tuple[int, str, str]:
    command = [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "Traceback" not in result.stderr
    return result.returncode, result.stdout, result.stderr


def test_merged_bytes_equal_those_of_megatron(tmp_path: Path, parts: Path):
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), np.uint16)
    for name in ("a", "b", "c"):
        builder.add_index(str(parts / name))
    builder.finalize(str(tmp_path / "theirs.idx"))
    code, output, _ = run_tool("merge_datasets.py", "--input", parts, "--output-prefix", tmp_path / "ours")
    assert code == 0
    assert output == f"wrote {tmp_path}/ours.bin and .idx: 3 pairs, 7 documents, 6 sequences, 0.0 MB\n"
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_what_cannot_be_merged(tmp_path: Path, parts: Path):
    with pytest.raises(ConfigurationError, match="is among the inputs"):
        merge_indexed_files(find_prefixes(str(parts)), str(parts / "a"))
    write(parts / "d", [[1]], np.int32)
    with pytest.raises(DataError, match=r"parts/d holds int32 tokens, .*parts/a uint16"):
        merge_indexed_files(find_prefixes(str(parts)), str(tmp_path / "out"))
    os.truncate(parts / "d.bin", 2)
    with pytest.raises(DataError, match=r"d\.bin has 2 bytes, but d\.idx places 4 bytes"):
        merge_indexed_files(find_prefixes(str(parts)), str(tmp_path / "out"))
    (parts / "d.bin").unlink()
    with pytest.raises(ConfigurationError, match=r"parts: d has only one of its \.bin and \.idx files"):
        find_prefixes(str(parts))
    with pytest.raises(ConfigurationError, match="is not a folder"):
        find_prefixes(str(parts / "a.bin"))
    assert not list(tmp_path.glob("out*"))


def test_one_pair_merged_is_itself(tmp_path: Path, parts: Path):
    merged = merge_indexed_files([str(parts / "b")], str(tmp_path / "copy"))
    assert merged == Merged(documents=3, sequences=2, token_bytes=8)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"copy.{suffix}").read_bytes() == (parts / f"b.{suffix}").read_bytes()


def test_summary(tmp_path: Path):
    prefix = write(tmp_path / "data", [[1], [2, 3], [], [4, 5, 6], [7] * 8])
    assert summarize(prefix) == Summary("uint16", 5, 1, 4, 14, 1, 8, [1, 2, 0, 1])
    code, output, _ = run_tool("inspect_dataset.py", "show", prefix)
    assert code == 0
    assert output.splitlines()[:3] == [
        f"{prefix}: 14 tokens of type uint16",
        "documents 5, 1 of them empty; sequences 4",
        "tokens in a sequence: 1 to 8, mean 3.5",
    ]
    assert [line.split()[:4] for line in output.splitlines()[3:]] == [
        ["1", "to", "1", "1"],
        ["2", "to", "3", "2"],
        ["4", "to", "7", "0"],
        ["8", "to", "15", "1"],
    ]


def test_documents_come_back_as_text(tmp_path: Path, parts: Path):
    prefix = write(tmp_path / "data", [list(b"first"), [], list("zwölf".encode())])
    assert document_tokens(prefix, 1) == []
    assert document_tokens(str(parts / "c"), 0) == [0, 1, 2]
    text = run_tool("inspect_dataset.py", "document", prefix, "2", "--tokenizer-type", "ByteTokenizer")
    assert text[:2] == (0, "zwölf\n")
    assert run_tool("inspect_dataset.py", "document", prefix, "0")[:2] == (0, "102 105 114 115 116\n")
    code, _, error = run_tool("inspect_dataset.py", "document", prefix, "3")
    assert (code, error) == (64, f"error: document 3 of {prefix}: the documents are 0 to 2\n")


def test_verify_names_the_token_outside_the_vocabulary(tmp_path: Path):
    prefix = write(tmp_path / "data", [[1, 2], [], [3, 300, 400]])
    assert run_tool("inspect_dataset.py", "verify", prefix, "--vocab-size", "401")[0] == 0
    code, _, error = run_tool("inspect_dataset.py", "verify", prefix, "--vocab-size", "300")
    assert code == 65
    assert error.startswith(f"error: {prefix}.bin: token 300 at byte 6 (document 2) is outside a vocabulary of 300: ")
    negative = write(tmp_path / "negative", [[1, -1]], np.int32)
    with pytest.raises(DataError, match=r"token -1 at byte 4 \(document 0\)"):
        check_token_ids(negative, 300)
    os.truncate(f"{prefix}.idx", 60)
    assert run_tool("inspect_dataset.py", "verify", prefix)[0] == 65


def test_a_huge_count_in_the_header_allocates_nothing(tmp_path: Path):
    prefix = write(tmp_path / "data", [[1, 2]])
    idx = bytearray(Path(f"{prefix}.idx").read_bytes())
    idx[18:26] = (2**62).to_bytes(8, "little")
    Path(f"{prefix}.idx").write_bytes(idx)
    with pytest.raises(DataError, match="its header speaks of 4611686018427387904 sequences"):
        summarize(prefix)
    Path(f"{prefix}.idx").write_bytes(b"")
    with pytest.raises(DataError, match="has 0 bytes"):
        summarize(prefix)
