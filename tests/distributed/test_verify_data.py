"""--verify-data on ranks: damaged data ends the run with 65 and the range of bytes, at the start or later."""

import json
import shlex
from pathlib import Path

import pytest

from megatron_ext.data.data_manifest import checksums
from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import flip
from tests.support.corpora import write_corpus
from tests.support.program import Ended, run_program

_FLAGS = """
    --num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --lr 1e-3 --micro-batch-size 1
    --global-batch-size 2 --eval-interval 0 --tokenizer-type NullTokenizer --vocab-size 61 --split 1
"""


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
    argv = [*shlex.split(_FLAGS), "--data-path", prefix, "--train-iters", str(steps), *flags]
    return run_ranks(ranks, run_program, argv)


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
