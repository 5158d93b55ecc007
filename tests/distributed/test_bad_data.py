"""Damaged data ends a run with 65: .bin and .idx files, cut, changed or empty, when they are opened; other bytes than
those that were written (--verify-data), at the start or later, with their range.

Both sample orders open the files: `shuffled` maps the .bin, `formula` reads it.
"""

import json
import shlex
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config.schema import Config, DataConfig, ModelConfig
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.data_manifest import checksums
from megatron_ext.data.indexed import HEADER, IndexedWriter
from megatron_ext.errors import DataError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.tokenizer.simple import NullTokenizer
from tests.support.checkpoints import flip
from tests.support.corpora import write_corpus
from tests.support.program import Ended, run_program

DOCUMENTS = 100_000
FLAGS = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --lr 1e-3 --micro-batch-size 2
    --train-iters 2 --eval-interval 0 --tokenizer-type NullTokenizer --vocab-size 61
"""


POINTERS = HEADER.size + 4 * DOCUMENTS
DAMAGE: dict[str, tuple[str, str, int, bytes | None]] = {
    "truncated .bin": (r"\.bin has \d+ bytes", ".bin", 1_999_998, None),
    "empty .bin": (r"\.bin has 0 bytes", ".bin", 0, None),
    "truncated .idx": (r"\.idx has \d+ bytes", ".idx", 100_000, None),
    "zero-length .idx": (r"\.idx has 0 bytes", ".idx", 0, None),
    "flipped length": (r"sequence 78 of", ".idx", HEADER.size + 4 * 77, b"\x0b"),
    "flipped pointer": (r"sequence 78 of", ".idx", POINTERS + 8 * 78 + 7, b"\x80"),
    "flipped magic": (r"begins with", ".idx", 0, b"m"),
    "token out of range": (r"token 61 at byte 0 \(document 0\) is outside a vocabulary", ".bin", 0, b"\x3d"),
    "offset overflow": (r"sequence 5 of", ".idx", POINTERS + 8 * 5, struct.pack("<q", 2**63 - 2)),
    "length overflow": (r"sequence 6 of", ".idx", HEADER.size + 4 * 5, struct.pack("<i", 2**31 - 1)),
    "absurd number of sequences": (r"of 1152921504606846976 sequences", ".idx", 18, struct.pack("<Q", 2**60)),
    "absurd number of documents": (r"\.idx has \d+ bytes", ".idx", 26, struct.pack("<Q", 2**64 - 1)),
}
"""What is said, the file, and the place at which it is cut or gets these bytes."""


def _harm(damage: str, prefix: Path) -> None:
    _, suffix, place, content = DAMAGE[damage]
    with prefix.with_suffix(suffix).open("r+b") as file:
        if content is None:
            file.truncate(place)
        else:
            file.seek(place)
            file.write(content)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """A million tokens in 100,000 documents: 2 MB each."""
    with IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add_tokens((np.arange(10 * DOCUMENTS) % 61).astype(np.uint16).tobytes(), [10] * DOCUMENTS)
    return tmp_path / "data"


@pytest.mark.parametrize("order", ["shuffled", "formula"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_at_open_without_a_large_allocation(damage: str, order: str, corpus: Path):
    size = corpus.with_suffix(".idx").stat().st_size
    _harm(damage, corpus)
    config = Config(
        model=ModelConfig(seq_length=8),
        data=DataConfig(train_data_path=(str(corpus),), data_order=order),
    )
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=DAMAGE[damage][0]):
            build_datasets(config, NullTokenizer(61), Splits(100, 0, 0))
        assert tracemalloc.get_traced_memory()[1] < 2 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("damage", ["truncated .bin", "token out of range", "offset overflow"])
def test_the_program_ends_with_65_and_names_the_file(damage: str, corpus: Path):
    _harm(damage, corpus)
    (ended,) = run_ranks(1, run_program, shlex.split(f"{FLAGS} --train-data-path {corpus}"))
    assert ended.code == 65
    assert f"rank 0: {corpus}" in ended.errors.strip().splitlines()[-1]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """A corpus of 40 kB whose manifest has blocks of 1 kB."""
    prefix = str(tmp_path / "corpus")
    write_corpus(tmp_path / "corpus", 20_000)
    content = {
        "tokenizer": {"type": "NullTokenizer", "vocab_size": 61},
        "outputs": {prefix: {"token_bytes": 40_000}},
        "checksums": checksums([prefix], 1024),
    }
    (tmp_path / "corpus_manifest.json").write_text(json.dumps(content))
    return prefix


def _run(prefix: str, *flags: str, steps: int = 2, ranks: int = 2) -> list[Ended]:
    argv = shlex.split(f"{FLAGS} --micro-batch-size 1 --split 1 --data-path {prefix} --train-iters {steps}")
    return run_ranks(ranks, run_program, [*argv, *flags])


def test_zeros_in_place_of_the_data_are_refused_by_default(prefix: str) -> None:
    assert [ended.code for ended in _run(prefix)] == [0, 0]
    Path(f"{prefix}.bin").write_bytes(bytes(40_000))
    refused = _run(prefix)
    assert {ended.code for ended in refused} == {65}
    assert "corpus.bin: bytes 0 to 1023 have the checksum" in "".join(ended.errors for ended in refused)
    assert [ended.code for ended in _run(prefix, "--verify-data", "off")] == [0, 0]


def test_a_byte_in_the_middle_is_found_at_the_start(prefix: str) -> None:
    flip(Path(f"{prefix}.bin"), 3 * 1024 + 6)
    refused = _run(prefix, "--verify-data", "start")
    assert {ended.code for ended in refused} == {65}
    assert "corpus.bin: bytes 3072 to 4095" in "".join(ended.errors for ended in refused)


def test_a_byte_in_the_middle_is_found_while_training(prefix: str) -> None:
    flip(Path(f"{prefix}.bin"), 3 * 1024 + 6)
    [ended] = _run(prefix, steps=100_000, ranks=1)
    assert ended.code == 65
    assert "corpus.bin: bytes 3072 to 4095 have the checksum" in ended.errors
    assert "iteration        1/" in ended.output, "it began to train"


def test_data_without_checksums_is_named_where_they_are_asked_for(prefix: str) -> None:
    Path(f"{prefix}_manifest.json").unlink()
    ended = _run(prefix, "--verify-data", "start")
    assert [one.code for one in ended] == [0, 0]
    assert f"--verify-data start: no manifest has checksums of {prefix}" in ended[0].errors
