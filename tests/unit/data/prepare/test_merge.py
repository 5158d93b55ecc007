import contextlib
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.inspect import Summary, document_tokens, shown, summarize
from megatron_ext.data.integrity import check_token_ids
from megatron_ext.data.mask import Mask
from megatron_ext.data.prepare.merge import Merged, find_prefixes, merge_indexed_files
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.tokenizer.byte import ByteTokenizer

ROOT = Path(__file__).parents[4]


def write(prefix: Path, documents: list[list[int]], dtype: Any = np.uint16) -> str:
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


def test_the_shortest_and_the_longest_may_be_anywhere(tmp_path: Path):
    for documents, shortest, longest in (([[1] * 3, [1], [1] * 2], 1, 3), ([[1], [1] * 5], 1, 5), ([[1] * 4], 4, 4)):
        found = summarize(write(tmp_path / "data", documents))
        assert (found.shortest, found.longest) == (shortest, longest)
        assert sum(found.histogram) == len(documents)


@pytest.mark.parametrize(("number", "taken"), [(-1, False), (0, True), (2, True), (3, False)])
def test_the_documents_that_there_are(tmp_path: Path, number: int, taken: bool):
    prefix = write(tmp_path / "data", [[5, 6], [], [7]])
    if taken:
        assert document_tokens(prefix, number) == [[5, 6], [], [7]][number]
        return
    with pytest.raises(ConfigurationError, match=f"document {number} of .*: the documents are 0 to 2$"):
        document_tokens(prefix, number)


@pytest.mark.parametrize("begins", ["10010", "00100", "00000", "11111"])
@pytest.mark.parametrize("counts", ["00000", "11111", "01100"])
def test_a_sample_is_shown_with_its_documents(begins: str, counts: str):
    """Tokens are trained on where the loss of the token before them counts; no document's number is none."""
    sample = {
        "tokens": list(b"abcde"),
        "loss_mask": [float(one) for one in counts],
        "document_begins": [one == "1" for one in begins],
    }
    expected, open_ = "", False
    for place, letter in enumerate("abcde"):
        trained = place > 0 and counts[place - 1] == "1"
        new = place > 0 and begins[place] == "1"
        if open_ and (new or not trained):
            expected, open_ = expected + "⟧", False
        expected += "\n--- document\n" if new else ""
        if trained and not open_:
            expected, open_ = expected + "⟦", True
        expected += letter
    assert shown(ByteTokenizer(), sample, in_color=False) == expected + "⟧" * open_
    colored = shown(ByteTokenizer(), sample, in_color=True)
    assert colored.replace("\x1b[32m", "⟦").replace("\x1b[0m", "⟧") == expected + "⟧" * open_


def test_the_only_colours_of_a_sample_are_its_own() -> None:
    """The text of a document may hold escape sequences, the same ones too."""
    text = b"a\x1b[32m\x1b[2J"
    sample = {
        "tokens": list(text),
        "loss_mask": [1.0] * len(text),
        "document_begins": [True, *[False] * (len(text) - 1)],
    }
    assert shown(ByteTokenizer(), sample, in_color=True) == "a\x1b[32m\\x1b[32m\\x1b[2J\x1b[0m"


def test_what_a_merge_would_write_over_itself_is_refused(tmp_path: Path):
    """By whatever name; and nothing is left of a merge that fails."""
    prefix = write(tmp_path / "a", [[1]])
    for output in (prefix, "a", "./a", f"{tmp_path}/x/../a"):
        with (
            contextlib.chdir(tmp_path),
            pytest.raises(ConfigurationError, match="is among the inputs; choose another name"),
        ):
            merge_indexed_files([prefix], output)
    other = write(tmp_path / "b", [[1]], np.int16)
    with pytest.raises(DataError, match=r"b holds int16 tokens, .*a uint16: they were made with different"):
        merge_indexed_files([prefix, other], str(tmp_path / "c"))
    with pytest.raises(ConfigurationError, match="is not a folder; give the folder of the"):
        find_prefixes(f"{prefix}.bin")
    os.unlink(f"{other}.idx")
    with pytest.raises(ConfigurationError, match=r"b has only one of its \.bin and \.idx files; copy both"):
        find_prefixes(str(tmp_path))
    os.unlink(f"{other}.bin")
    assert find_prefixes(str(tmp_path)) == [prefix]


def _manifest(prefix: str, kind: str | None) -> None:
    size = os.path.getsize(f"{prefix}.bin")
    path = Path(f"{prefix}_manifest.json")
    if kind is None:
        path.unlink(missing_ok=True)
        return
    record = {"type": kind, "sha256": "1", "vocab_size": 9, "eod": 8}
    path.write_text(json.dumps({"tokenizer": record, "outputs": {prefix: {"token_bytes": size}}}))


@pytest.mark.parametrize(
    ("kinds", "named"),
    [(("A", "A"), True), (("A", None), False), ((None, "A"), False), ((None, None), False), (("A", "B"), False)],
)
@pytest.mark.parametrize("there", [None, "merged", "preprocessed"])
def test_a_merged_manifest_names_the_one_tokenizer(
    tmp_path: Path, kinds: tuple[str | None, ...], named: bool, there: str | None
):
    """And takes the place of that of an earlier merge, but not of one of another name's preprocessing."""
    prefixes = [write(tmp_path / name, [[1, 2], [], [3]]) for name in ("a", "b")]
    for prefix, kind in zip(prefixes, kinds, strict=True):
        _manifest(prefix, kind)
    path = tmp_path / "all_manifest.json"
    old = {"tokenizer": {}, "outputs": {}} | ({"merged": []} if there == "merged" else {})
    if there:
        path.write_text(json.dumps(old))
    merged = merge_indexed_files(prefixes, str(tmp_path / "all"), accept_other_tokenizer=True)
    assert merged == Merged(documents=6, sequences=4, token_bytes=12)
    if there == "preprocessed":
        assert json.loads(path.read_text()) == old
        return
    assert path.exists() == named
    if named:
        content = json.loads(path.read_text())
        assert content["merged"] == prefixes
        assert content["tokenizer"] == {"type": "A", "sha256": "1", "vocab_size": 9, "eod": 8}
        assert content["outputs"] == {str(tmp_path / "all"): {"documents": 6, "sequences": 4, "token_bytes": 12}}
    if kinds == ("A", "B"):
        with pytest.raises(DataError, match=r"b was made with B 1 \(9 ids, end of document 8\), .*a with A 1 \(9 ids"):
            merge_indexed_files(prefixes, str(tmp_path / "all"))


@pytest.mark.parametrize(("packed", "expected"), [((8, 8), 8), ((8, 0), 0), ((0, 0), 0), ((8, 16), 0)])
def test_merged_masks_are_packed_to_what_all_are(tmp_path: Path, packed: tuple[int, int], expected: int):
    prefixes = []
    for name, length in zip("ab", packed, strict=True):
        with IndexedWriter(tmp_path / name, np.uint16, packed_to=length) as writer:
            writer.add_tokens(b"\1\0\2\0", [2], np.array([2, 1], np.uint8))
        prefixes.append(str(tmp_path / name))
    merge_indexed_files(prefixes, str(tmp_path / "all"))
    mask = Mask(str(tmp_path / "all"), 4)
    assert (mask.packed_to, mask.read(0, 4).tolist()) == (expected, [2, 1, 2, 1])


@pytest.mark.parametrize("failing", [1, 2, 3])
def test_a_full_disk_leaves_the_old_files_and_nothing_else(
    failing: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with IndexedWriter(tmp_path / "a", np.uint16, packed_to=0) as writer:
        writer.add_tokens(b"\1\0\2\0", [2], np.array([2, 1], np.uint8))
    for suffix in (".idx", ".bin", ".mask"):
        (tmp_path / f"all{suffix}").write_bytes(b"old")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    calls = itertools.count(1)

    def full(descriptor: int) -> None:
        if next(calls) == failing:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        merge_indexed_files([str(tmp_path / "a")], str(tmp_path / "all"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_mask_that_becomes_shorter_is_named(tmp_path: Path):
    with IndexedWriter(tmp_path / "a", np.uint16, packed_to=0) as writer:
        writer.add_tokens(bytes(8), [4], np.array([2, 1, 0, 1], np.uint8))
    mask = Mask(str(tmp_path / "a"), 4)
    os.truncate(tmp_path / "a.mask", 16 + 2)
    assert (mask.read(0, 2).tolist(), mask.read(1, 0).tolist()) == ([2, 1], [])
    with pytest.raises(DataError, match=r"a\.mask ends before token 4: it was truncated during the run"):
        mask.read(1, 3)
