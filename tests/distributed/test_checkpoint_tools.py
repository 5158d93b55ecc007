"""Tools on the checkpoints of a run. tools/average_checkpoints.py: the mean of each weight, which converts, and which
training begins from; tools/inspect_checkpoint.py, as its users call it.
"""

import contextlib
import io
import shlex
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_ext.commandline import run_tool
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.checkpoint_tools.commands.average_checkpoints import main
from megatron_ext.plugins.checkpoint_tools.commands.inspect_checkpoint import main as inspect
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from tests.support.checkpoints import FLAGS, load, save_at
from tests.support.launched import ROOT

# Of the second tier: tests/distributed/test_checkpoint_layouts.py reads what tools read.
pytestmark = pytest.mark.full

TOOL = ROOT / "tools" / "inspect_checkpoint.py"


LLAMA = shlex.split(
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope --bf16 "
    "--untie-embeddings-and-output-weights --tokenizer-type NullTokenizer"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_ranks(2, save_at, str(folder), [1, 2, 4], [*FLAGS, *LLAMA, "--tensor-model-parallel-size", "2"])
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


def _inspect(*words: object) -> tuple[int, str]:
    """The program in this process: its exit code and its output."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(TOOL), *map(str, words)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        run_tool(inspect)
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.getvalue()


def test_ls(saved: Path) -> None:
    code, said = _inspect("ls", saved)
    assert code == 0
    assert [line[:15] for line in said.splitlines()] == ["  iter_0000001 ", "  iter_0000002 ", "* iter_0000004 "]
    assert all(line.endswith("manifest") for line in said.splitlines())


def test_show_lists_whole_tensors(saved: Path) -> None:
    code, said = _inspect("show", saved)
    lines = {line.split()[0]: line.split()[1:] for line in said.splitlines()}
    assert code == 0
    assert lines["iteration"] == ["4"]
    assert lines["adam_updates"] == ["4"]
    # 61 entries padded to 64; both tensor-parallel halves.
    assert lines["embedding.word_embeddings.weight"][:4] == ["bfloat16", "64", "x", "32"]
    assert lines["decoder.final_layernorm.weight"][:3] == ["bfloat16", "32", "norm"]
    assert float(lines["decoder.final_layernorm.weight"][-1]) == pytest.approx(32**0.5, rel=0.1)
    assert "optimizer.state.exp_avg_sq.embedding.word_embeddings.weight" in lines


def test_a_path_alone_is_shown(saved: Path, tmp_path: Path) -> None:
    for path in (saved, saved / "iter_0000001"):
        assert _inspect(path) == _inspect("show", path)
        assert "embedding.word_embeddings.weight" in _inspect(path)[1]
    code, said = _inspect(tmp_path / "missing")
    assert (code, "is no checkpoint, and holds none" in said) == (64, True)
    code, said = _inspect("show")
    assert (code, "required: PATH" in said) == (64, True)
    code, said = _inspect("shwo", saved)
    assert (code, "invalid choice: 'shwo'" in said) == (64, True)
