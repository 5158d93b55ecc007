import struct
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_ext.data.indexed import IndexedWriter, token_dtype
from megatron_ext.data.integrity import check_indexed_files, file_fingerprint, open_index, share_of
from megatron_ext.errors import ConfigurationError, DataError

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10]]
LENGTHS = np.array([len(document) for document in DOCUMENTS])
TOKENS = [token for document in DOCUMENTS for token in document]


@pytest.fixture
def pair(tmp_path: Path) -> str:
    prefix = str(tmp_path / "data")
    with IndexedWriter(prefix, np.uint16) as writer:
        writer.add_tokens(np.array(TOKENS[:3], np.uint16).tobytes(), LENGTHS[:2])
        writer.add_tokens(np.array(TOKENS[3:], np.uint16).tobytes(), LENGTHS[2:])
    return prefix


def test_bytes_of_both_files(pair: str):
    assert Path(f"{pair}.bin").read_bytes() == struct.pack("<6H", *TOKENS)
    assert Path(f"{pair}.idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, 3, 5)
        + struct.pack("<3i", 3, 1, 2)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<5q", 0, 1, 1, 2, 3)
    )


def test_megatron_core_reads_it(pair: str):
    dataset = IndexedDataset(pair)
    assert [np.asarray(dataset.get(i)).tolist() for i in range(len(dataset))] == [[5, 6, 7], [8], [9, 10]]
    assert dataset.document_indices.tolist() == [0, 1, 1, 2, 3]
    check_indexed_files(pair)
    assert open_index(pair).lengths.tolist() == [3, 1, 2]


def test_dtype_rule():
    assert token_dtype(65499) is np.uint16
    assert token_dtype(65500) is np.int32


def test_nothing_appears_before_it_is_whole(tmp_path: Path):
    writer = IndexedWriter(tmp_path / "data", np.int32)
    writer.add_tokens(np.array([1, 2], np.int32).tobytes(), np.array([2]))
    assert not {"data.bin", "data.idx"} & {path.name for path in tmp_path.iterdir()}
    writer.finish()
    assert {path.name for path in tmp_path.iterdir()} == {"data.bin", "data.idx"}


def test_a_failure_leaves_the_old_pair_and_nothing_else(pair: str):
    before = {path.name: path.read_bytes() for path in Path(pair).parent.iterdir()}

    def fail_midway() -> None:
        with IndexedWriter(pair, np.uint16) as writer:
            writer.add_tokens(b"\1\0", np.array([1]))
            raise KeyError

    with pytest.raises(KeyError):
        fail_midway()
    assert {path.name: path.read_bytes() for path in Path(pair).parent.iterdir()} == before


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


def test_missing_files(tmp_path: Path, pair: str):
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
