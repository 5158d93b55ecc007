"""When a real small run saves, and what becomes of a save in the background when the run fails."""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native.checkpoint_folder import saved_iterations
from megatron_ext.errors import NumericError
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback
from tests.support.small_runs import MODEL


def _saves(folder: Path, flags: str, **own: Any) -> list[int]:
    pretrain([*MODEL, "--eval-iters", "0", "--save", str(folder), "--load", str(folder), *flags.split()], **own)
    return saved_iterations(folder)


@pytest.mark.parametrize("background", ["", " --async-save"])
def test_the_end_saves_what_is_not_saved_yet(
    background: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _saves(tmp_path / "a", f"--save-interval 2{background}") == [2, 3]
    waits = r" \(in the background; training stopped for \d+\.\d s\)" if background else ""
    said = re.findall(r"^checkpoint: saved .*/iter_(\d+) in \d+\.\d s(.*)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(iteration) for iteration, _ in said] == [2, 3]
    assert all(re.fullmatch(waits, how) for _, how in said), "each save is told of once, with its own times"
    assert _saves(tmp_path / "b", f"--save-interval 3{background}") == [3]
    assert _saves(tmp_path / "c", background) == [3]
    assert _saves(tmp_path / "c", background) == [3]
    assert "saved" not in capsys.readouterr().out.partition("resuming at iteration 3")[2]


class OwnError(Exception):
    """What a user's own code raises."""


class FailsAt(Callback):
    """Fails at the end of a step."""

    def __init__(self, iteration: int, error: Exception):
        self.iteration, self.error = iteration, error

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.run.state.iteration == self.iteration:
            raise self.error


@pytest.mark.parametrize(
    ("error", "finishes"), [(NumericError("NaN"), True), (OwnError("mine"), False), (KeyboardInterrupt(), False)]
)
def test_a_background_save_is_finished_only_where_all_ranks_are_there(
    error: Any, finishes: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are after a numeric error, which every rank raises; after any other the collective might wait for ever."""
    with pytest.raises(type(error)):
        _saves(tmp_path, "--save-interval 2 --async-save", callbacks=[FailsAt(2, error)])
    assert saved_iterations(tmp_path) == ([2] if finishes else [])
    warned = "the background save of iteration 2 was not finished and is no checkpoint" in capsys.readouterr().err
    assert warned != finishes
