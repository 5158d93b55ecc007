"""Damaged, cut and altered pairs are found and named, and fingerprints tell files apart."""

import struct
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.integrity import (
    check_indexed_files,
    check_some_token_ids,
    check_token_ids,
    file_fingerprint,
    open_index,
    share_of,
)
from megatron_ext.errors import ConfigurationError, DataError
from tests.support.corpora import write_documents

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10]]

TOKENS = [token for document in DOCUMENTS for token in document]


@pytest.fixture
def pair(tmp_path: Path) -> str:
    return write_documents(tmp_path / "data", DOCUMENTS)


def test_megatron_core_reads_the_pair(pair: str):
    dataset = IndexedDataset(pair)
    assert [np.asarray(dataset.get(i)).tolist() for i in range(len(dataset))] == [[5, 6, 7], [8], [9, 10]]
    assert dataset.document_indices.tolist() == [0, 1, 1, 2, 3]
    check_indexed_files(pair)
    assert open_index(pair).lengths.tolist() == [3, 1, 2]


@pytest.mark.parametrize(("suffix", "size"), [(".bin", 0), (".bin", 11), (".idx", 0), (".idx", 20), (".idx", 100)])
def test_truncation_is_found_and_named(pair: str, suffix: str, size: int):
    path = Path(pair + suffix)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(DataError) as caught:
        check_indexed_files(pair)
    assert f"{path} has {size} bytes" in str(caught.value)


def test_a_longer_bin_is_found(pair: str):
    with open(f"{pair}.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(DataError, match=r"has 14 bytes, but data\.idx places 12 bytes"):
        check_indexed_files(pair)


def test_every_flipped_bit_that_training_reads_is_found(pair: str):
    path = Path(f"{pair}.idx")
    whole = path.read_bytes()
    for bit in range(8 * (len(whole) - 8 * 5)):  # all but the document indices, which GPTDataset does not use
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(DataError):
            check_indexed_files(pair)


@pytest.mark.parametrize("indices", [(1, 1, 1, 2, 3), (0, 2, 1, 2, 3), (0, 1, 1, 2, 4)])
def test_document_indices_that_do_not_rise_to_the_end(pair: str, indices: tuple[int, ...]):
    path = Path(f"{pair}.idx")
    path.write_bytes(path.read_bytes()[:-40] + struct.pack("<5q", *indices))
    with pytest.raises(DataError, match="document indices do not rise from 0 to 3"):
        check_indexed_files(pair)


@pytest.fixture(scope="module")
def long_pair(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An index of which a check that is not whole reads about a third."""
    prefix = str(tmp_path_factory.mktemp("long") / "data")
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(np.zeros(300_000, np.uint16).tobytes(), [3] * 100_000)
    return prefix


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (34 + 4 * 5, 4),  # length of sequence 5
        (34 + 4 * 99_999, 4),  # of the last one
        (34 + 4 * 100_000 + 8 * 10, 61),  # byte pointer of sequence 10
        (34 + 4 * 100_000 + 8 * 50_000, 0),  # where the share of one half begins
        (34 + 12 * 100_000, 1),  # first document
        (34 + 12 * 100_000 + 8 * 100_000, 99_999),  # end of the last document
    ],
)
def test_a_large_index_is_checked_where_it_is_used(long_pair: str, tmp_path: Path, offset: int, value: int):
    check_indexed_files(long_pair, whole_index_up_to=1000)
    whole = bytearray(Path(f"{long_pair}.idx").read_bytes())
    size = 4 if offset < 34 + 4 * 100_000 else 8
    whole[offset : offset + size] = value.to_bytes(size, "little")
    (tmp_path / "data.idx").write_bytes(whole)
    (tmp_path / "data.bin").symlink_to(f"{long_pair}.bin")

    def open_half(prefix: str) -> None:
        check_indexed_files(prefix, whole_index_up_to=1000)
        share_of(prefix, (0.0, 0.5))

    open_half(long_pair)
    with pytest.raises(DataError, match=r"data\.idx"):
        open_half(str(tmp_path / "data"))


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_large_pair_that_is_truncated_is_found(long_pair: str, tmp_path: Path, suffix: str):
    for name in (".bin", ".idx"):
        content = Path(long_pair + name).read_bytes()
        (tmp_path / f"data{name}").write_bytes(content[: -2 if name == suffix else None])
    with pytest.raises(DataError, match=rf"data\{suffix} has"):
        check_indexed_files(str(tmp_path / "data"), whole_index_up_to=1000)


def test_missing_files_are_named(tmp_path: Path, pair: str):
    with pytest.raises(ConfigurationError, match=r"none\.idx does not exist"):
        check_indexed_files(str(tmp_path / "none"))
    Path(f"{pair}.bin").unlink()
    with pytest.raises(ConfigurationError, match=r"data\.bin does not exist"):
        check_indexed_files(pair)


def test_fingerprint_follows_the_content(tmp_path: Path, pair: str):
    for suffix in (".bin", ".idx"):
        (tmp_path / f"copy{suffix}").write_bytes(Path(pair + suffix).read_bytes())
    copy = str(tmp_path / "copy")
    for suffix in (".bin", ".idx"):
        assert file_fingerprint(copy + suffix) == file_fingerprint(pair + suffix)
    Path(f"{copy}.bin").write_bytes(struct.pack("<6H", *TOKENS[:-1], 11))
    assert file_fingerprint(f"{copy}.bin") != file_fingerprint(f"{pair}.bin")


def test_an_index_with_a_mode_for_each_sequence_is_whole(pair: str):
    """As Megatron writes it for multimodal data: a byte more for each sequence, and no other size."""
    path = Path(f"{pair}.idx")
    whole = path.read_bytes()
    for more in range(5):
        path.write_bytes(whole + bytes(more))
        if more in (0, 3):
            check_indexed_files(pair)
            continue
        with pytest.raises(
            DataError, match=f"has {len(whole) + more} bytes, but its header speaks of 3 sequences and 4 "
        ):
            check_indexed_files(pair)


def test_a_negative_length_is_found(pair: str):
    """Also where the byte pointers follow from it."""
    path = Path(f"{pair}.idx")
    whole = path.read_bytes()
    path.write_bytes(whole[:34] + struct.pack("<3i3q", 8, -2, 0, 0, 16, 12) + whole[70:])
    with pytest.raises(DataError, match=r"sequence 1 of 3 has length -2 and byte pointer 16"):
        check_indexed_files(pair)


def test_an_index_of_the_largest_size_is_read_whole(long_pair: str, tmp_path: Path):
    """One of a byte more at its ends and in 64 places."""
    whole = bytearray(Path(f"{long_pair}.idx").read_bytes())
    whole[34 + 4 * 900 : 38 + 4 * 900] = (4).to_bytes(4, "little")  # between two of the places
    (tmp_path / "data.idx").write_bytes(whole)
    (tmp_path / "data.bin").symlink_to(f"{long_pair}.bin")
    check_indexed_files(str(tmp_path / "data"), whole_index_up_to=len(whole) - 1)
    for largest in (len(whole), None):
        with pytest.raises(DataError, match="sequence 901 of 100000 has length 3 and byte pointer 5406"):
            check_indexed_files(str(tmp_path / "data"), whole_index_up_to=largest)


def test_a_large_index_begins_at_the_first_byte(long_pair: str, tmp_path: Path):
    whole = bytearray(Path(f"{long_pair}.idx").read_bytes())
    pointers = np.frombuffer(whole, "<i8", 100_000, 34 + 4 * 100_000) + 6
    whole[34 + 4 * 100_000 : 34 + 12 * 100_000] = pointers.tobytes()
    (tmp_path / "data.idx").write_bytes(whole)
    (tmp_path / "data.bin").write_bytes(bytes(600_006))
    with pytest.raises(DataError, match="sequence 0 of 100000 has length 3 and byte pointer 6"):
        check_indexed_files(str(tmp_path / "data"), whole_index_up_to=1000)


@pytest.mark.parametrize(("vocab_size", "wrong"), [(11, None), (10, 10), (9, 9), (8, 8), (6, 6), (5, 5)])
def test_the_first_token_that_is_outside_is_named_with_its_document(pair: str, vocab_size: int, wrong: int | None):
    """By the byte at which it stands; documents 0, 2 and 3 have tokens."""
    if wrong is None:
        check_token_ids(pair, vocab_size)
        check_some_token_ids(pair, vocab_size)
        return
    place = TOKENS.index(wrong)
    document = (0, 0, 0, 2, 3, 3)[place]
    for check in (check_token_ids, check_some_token_ids):
        with pytest.raises(DataError) as caught:
            check(pair, vocab_size)
        assert str(caught.value).startswith(
            f"{pair}.bin: token {wrong} at byte {2 * place} (document {document}) is outside a vocabulary of "
            f"{vocab_size}: "
        )


@pytest.mark.parametrize("place", [0, 1023, 299_000, 299_999])
def test_both_ends_of_a_large_pair_are_looked_at(tmp_path: Path, place: int):
    tokens = np.zeros(300_000, np.int32)
    tokens[place] = -1
    with IndexedWriter(tmp_path / "data", np.int32) as writer:
        writer.add_tokens(tokens.tobytes(), [300_000])
    with pytest.raises(DataError, match=rf"token -1 at byte {4 * place} \(document 0\)"):
        check_some_token_ids(str(tmp_path / "data"), 10)


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [((0.0, 1.0), (0, 3, 0, 6)), ((0.0, 0.5), (0, 2, 0, 4)), ((0.5, 1.0), (2, 3, 4, 2)), ((0.1, 0.3), (0, 1, 0, 3))],
)
def test_shares_are_rounded_as_megatron_core_rounds(pair: str, bounds: tuple[float, float], expected: tuple[int, ...]):
    """Half a sequence to the even number: 1.5 to 2."""
    share = share_of(pair, bounds)
    assert (share.first, share.end, share.first_token, share.tokens) == expected


@pytest.mark.parametrize("size", [0, 1, (1 << 16) - 1, 1 << 16, 1 << 17, (1 << 17) + 1, 1 << 20])
def test_a_fingerprint_is_of_the_size_and_both_ends(tmp_path: Path, size: int):
    path = tmp_path / "file"
    found = []
    for content in (bytes(size), bytes(size + 1), b"\1" + bytes(size)[1:], bytes(size)[:-1] + b"\1"):
        path.write_bytes(content)
        found.append(file_fingerprint(str(path)))
    assert len(set(found)) == (3 if size < 2 else 4)
    path.write_bytes(bytes(size))
    assert file_fingerprint(str(path)) == found[0]


@pytest.mark.parametrize("size", [1 << 18, (1 << 18) + 12_345])
def test_a_fingerprint_is_of_64_places_in_between(tmp_path: Path, size: int):
    path = tmp_path / "file"
    content = bytearray(size)
    path.write_bytes(content)
    whole, end = file_fingerprint(str(path)), 1 << 16
    for number in (0, 1, 32, 63):
        content[end + number * (size - 2 * end) // 64] = 1
        path.write_bytes(content)
        assert file_fingerprint(str(path)) != whole
        content[end + number * (size - 2 * end) // 64] = 0
