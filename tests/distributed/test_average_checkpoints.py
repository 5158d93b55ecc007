"""tools/average_checkpoints.py: the mean of each weight, which converts, and which training begins from."""

import shlex
from pathlib import Path

import pytest
import torch

from megatron_ext.checkpoint.native.tensors import Tensors
from megatron_ext.cli.average_checkpoints import main
from megatron_ext.cli.convert_checkpoint import main as convert
from megatron_ext.errors import ConfigurationError
from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import FLAGS, load, save_at

LLAMA = shlex.split(
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --bf16 "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(2, save_at, str(folder), [1, 2, 4], [*FLAGS, *LLAMA, "--use-distributed-optimizer"])
    return folder


def test_the_mean_of_two_checkpoints(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    averaged = tmp_path / "averaged"
    assert main(["--load", str(saved), "--last", "2", "--save", str(averaged)]) == 0
    assert "the mean of 2 checkpoints" in capsys.readouterr().out
    found, first, second = (
        Tensors(path) for path in (averaged / "iter_0000000", saved / "iter_0000002", saved / "iter_0000004")
    )
    names = [name for name in first.names() if not name.startswith("optimizer.")]
    assert found.names() == names
    for name in names:
        mean = ((first.read(name).double() + second.read(name).double()) / 2).bfloat16()
        assert torch.equal(found.read(name), mean), name
    assert convert(["to-hf", "--load", str(averaged), "--save", str(tmp_path / "hf")]) == 0
    assert "largest difference of logits to transformers" in capsys.readouterr().out
    assert run_ranks(2, load, str(averaged), [*FLAGS, *LLAMA, "--use-torch-fsdp2"]) == [(0, 0)] * 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--last 1", "one checkpoint is its own average"),
        ("--last 4", "its checkpoints are 1, 2, 4"),
        ("--iterations 1 3", "--iterations 3; its checkpoints are 1, 2, 4"),
        ("--iterations 1 2 --last 2", "give one of them"),
    ],
)
def test_what_cannot_be_averaged(words: str, says: str, saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=says):
        main(["--load", str(saved), *words.split(), "--save", str(tmp_path / "out")])


def test_checkpoints_of_two_models(saved: Path, tmp_path: Path) -> None:
    run_ranks(1, save_at, str(tmp_path / "other"), [1], FLAGS)
    with pytest.raises(ConfigurationError, match="are not of one model"):
        main(["--load", str(saved), str(tmp_path / "other"), "--save", str(tmp_path / "out")])
    with pytest.raises(ConfigurationError, match="holds no checkpoint"):
        main(["--load", str(saved), str(tmp_path / "none"), "--save", str(tmp_path / "out")])
