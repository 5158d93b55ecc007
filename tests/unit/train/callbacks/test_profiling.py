"""--record-memory-history: whose memory is recorded, and when each rank writes what a device without a GPU has not."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import StorageError
from megatron_ext.train.callbacks import profiling
from megatron_ext.train.callbacks.profiling import MemoryHistory
from tests.support.bare_trainer import NOTHING, bare_trainer
from tests.support.small_models import small_config


class RecordingDevice:
    """In the place of a GPU that records its allocations; its disk may be full."""

    def __init__(self, *, full: bool = False):
        self.full, self.begun, self.files = full, 0, []

    def record_memory_history(self) -> None:
        self.begun += 1

    def write_memory_history(self, file: str) -> None:
        self.files.append(file)
        if self.full:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("rank", [0, 3])
def test_the_history_of_memory_is_written_with_each_log_line_and_at_the_end(rank: int, tmp_path: Path) -> None:
    """Each rank into its own file, whose folder is made."""
    device = RecordingDevice()
    trainer = bare_trainer(device=device)
    callback = MemoryHistory(str(tmp_path / "new" / "folder" / "memory.pickle"), rank, 3)
    own = str(tmp_path / "new" / "folder" / f"memory_{rank}.pickle")
    written = []
    for trainer.run.state.iteration in range(1, 8):
        callback.on_step_end(trainer, NOTHING)
        written += [trainer.run.state.iteration] * len(device.files)
        device.files.clear()
    assert written == [1, 3, 6]
    assert (tmp_path / "new" / "folder").is_dir()
    callback.on_end(trainer)
    callback.on_failure(trainer, MemoryError())
    assert device.files == [own, own]


def test_a_history_that_cannot_be_written_hides_no_error(tmp_path: Path) -> None:
    trainer = bare_trainer(device=RecordingDevice(full=True))
    callback = MemoryHistory(str(tmp_path / "memory.pickle"), 2, 1)
    said = rf"^cannot write --memory-snapshot-path {tmp_path}/memory_2\.pickle: No space left on device\. .*"
    with pytest.raises(StorageError, match=said):
        callback.on_end(trainer)
    callback.on_failure(trainer, MemoryError())


@pytest.mark.parametrize(
    ("records", "ranks", "rank", "expected"),
    [(True, None, 5, True), (True, (0, 5), 5, True), (True, (0, 5), 1, False), (False, (5,), 5, False)],
)
def test_whose_memory_is_recorded(records: bool, ranks: tuple[int, ...] | None, rank: int, expected: bool) -> None:
    config = small_config()
    flags = dataclasses.replace(config.profiling, record_memory_history=records, profile_ranks=ranks)
    device: Any = RecordingDevice()
    profiling.begin(dataclasses.replace(config, profiling=flags), rank, device)
    assert device.begun == int(expected)
