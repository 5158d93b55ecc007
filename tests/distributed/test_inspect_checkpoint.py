"""tools/inspect_checkpoint.py, as its users call it."""

import contextlib
import io
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import FLAGS, save_at
from tests.support.launched import ROOT

TOOL = ROOT / "tools" / "inspect_checkpoint.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_ranks(2, save_at, str(folder), [1, 2], [*FLAGS, "--tensor-model-parallel-size", "2"])
    return folder


def _inspect(*words: object) -> tuple[int, str]:
    """The program in this process: its exit code and its output."""
    said = io.StringIO()
    with (
        mock.patch.object(sys, "argv", [str(TOOL), *map(str, words)]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_path(str(TOOL), run_name="__main__")
    assert isinstance(ended.value.code, int)
    return ended.value.code, said.getvalue()


def test_ls(saved: Path) -> None:
    code, said = _inspect("ls", saved)
    first, second = said.splitlines()
    assert code == 0
    assert first.startswith("  iter_0000001 ")
    assert second.startswith("* iter_0000002 ")
    assert second.endswith("manifest")


def test_show_lists_whole_tensors(saved: Path) -> None:
    code, said = _inspect("show", saved)
    lines = {line.split()[0]: line.split()[1:] for line in said.splitlines()}
    assert code == 0
    assert lines["iteration"] == ["2"]
    assert lines["adam_updates"] == ["2"]
    # 61 entries padded to 64; both tensor-parallel halves.
    assert lines["embedding.word_embeddings.weight"][:4] == ["float32", "64", "x", "32"]
    assert lines["decoder.final_layernorm.weight"][:3] == ["float32", "32", "norm"]
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
