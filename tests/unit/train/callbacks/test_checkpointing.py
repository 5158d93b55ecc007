"""When a real small run saves and takes snapshots, and what becomes of a save in the background when the run fails.

tests/distributed/test_snapshots.py goes on from snapshots.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native.checkpoint_folder import saved_iterations
from megatron_ext.errors import NumericError
from megatron_ext.train.callbacks.checkpointing import Snapshots
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback
from tests.support.bare_trainer import NOTHING, bare_trainer
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


class Writer:
    """In the place of the machine's memory, which is full at the third snapshot."""

    folder, bytes = Path("/dev/shm/run"), 2_500_000

    def __init__(self) -> None:
        self.problem: str | None = None
        self.there: list[int] = []
        self.under_way = self.patience = None
        self.trainer: Any = None

    def remove_later(self) -> None:
        self.there = [step for step in self.there if step <= self.trainer.run.state.iteration]

    def take(self) -> float:
        assert self.under_way is None, "the last one is being written"
        self.under_way = self.trainer.run.state.iteration
        return 0.125

    def join(self, seconds: float | None = None) -> None:
        if self.under_way is not None:
            self.there.append(self.under_way)
            self.problem = "No space left on device" if len(self.there) >= 3 else None
        self.under_way, self.patience = None, seconds

    def forget(self) -> None:
        self.join()
        self.there = []


def _taken(rank: int = 0, *, steps: int = 12) -> tuple[Snapshots, Any, Writer]:
    writer: Any = Writer()
    trainer = writer.trainer = bare_trainer(rank=rank)
    callback = Snapshots(writer, 2, 6)
    writer.there = [99]
    callback.on_start(trainer)
    for trainer.run.state.iteration in range(1, steps + 1):
        callback.on_step_end(trainer, NOTHING)
    return callback, trainer, writer


def test_snapshots_are_taken_but_where_a_checkpoint_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    """Later ones of an earlier attempt go; what one costs is said once, and once that one has failed."""
    _, _, writer = _taken()
    assert (writer.there, writer.under_way) == ([2, 4, 8], 10)
    said = capsys.readouterr()
    assert said.out.count("snapshots: every 2 steps to /dev/shm/run, 2.5 MB of rank 0; training stopped for 0.125") == 1
    assert said.err.count("rank 0 takes no snapshots any more: No space left on device") == 1
    _taken(rank=1, steps=4)
    assert capsys.readouterr().out == "", "one rank says what they cost"


def test_after_a_failure_the_last_one_is_written_if_that_takes_not_for_ever() -> None:
    """The peer of its copy may be gone."""
    callback, trainer, writer = _taken()
    callback.on_failure(trainer, KeyboardInterrupt())
    assert (writer.there[-1], writer.patience) == (10, 5.0)


def test_a_run_that_is_saved_needs_none() -> None:
    callback, trainer, writer = _taken()
    callback.on_end(trainer)
    assert (writer.there, writer.under_way) == ([], None)
