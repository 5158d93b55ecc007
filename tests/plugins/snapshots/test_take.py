"""When a run takes snapshots, and what it says of them. tests/distributed/test_snapshots.py goes on from snapshots."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.plugins.snapshots.take import Snapshots
from tests.support.bare_trainer import NOTHING, bare_trainer


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
