"""Pairs of files joined into one: the bytes of Megatron's tool, one manifest and one mask."""

import contextlib
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.mask import Mask
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.prepare.commands import merge_datasets
from megatron_ext.plugins.prepare.merge import Merged, find_prefixes, merge_indexed_files
from tests.support.corpora import write_documents


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    folder = tmp_path / "parts"
    folder.mkdir()
    write_documents(folder / "b", [[1, 2, 3], [], [4]])
    write_documents(folder / "a", [[], [5, 6]])
    builder = IndexedDatasetBuilder(str(folder / "c.bin"), np.uint16)  # documents of several sequences, as Megatron has
    for lengths in ([2, 1], [3]):
        builder.add_document(np.arange(sum(lengths), dtype=np.uint16), lengths)  # type: ignore[arg-type]
    builder.finalize(str(folder / "c.idx"))
    return folder


def test_merged_bytes_equal_those_of_megatron(tmp_path: Path, parts: Path, capsys: pytest.CaptureFixture[str]):
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), np.uint16)
    for name in ("a", "b", "c"):
        builder.add_index(str(parts / name))
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert merge_datasets.main(["--input", str(parts), "--output-prefix", str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path}/ours.bin and .idx: 3 pairs, 7 documents, 6 sequences, 0.0 MB\n"
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_pairs_that_cannot_be_merged_are_refused(tmp_path: Path, parts: Path):
    write_documents(parts / "d", [[1]], np.int32)
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


def test_a_merge_over_its_own_inputs_is_refused(tmp_path: Path):
    """By whatever name."""
    prefix = write_documents(tmp_path / "a", [[1]])
    for output in (prefix, "a", "./a", f"{tmp_path}/x/../a"):
        with (
            contextlib.chdir(tmp_path),
            pytest.raises(ConfigurationError, match="is among the inputs; choose another name"),
        ):
            merge_indexed_files([prefix], output)


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
    prefixes = [write_documents(tmp_path / name, [[1, 2], [], [3]]) for name in ("a", "b")]
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
