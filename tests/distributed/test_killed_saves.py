"""A save killed at any of 50 moments leaves the checkpoint before it whole, and that, or the new one, is loaded."""

import signal
import time
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER, saved_iterations
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.verify.ranks import RankError, run_ranks
from tests.support.checkpoints import FLAGS, build, file_hashes, load, save_at, train

POINTS = 50


def _save_and_die(folder: str, seconds: float | None) -> float:
    """Save at step 2; the kernel ends the process that long after the save has begun, in Python or in a system call."""
    run = build(FLAGS)
    train(run, 2)
    if seconds is not None:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # it ends the process as SIGKILL does
        signal.setitimer(signal.ITIMER_REAL, seconds)
    started = time.perf_counter()
    save_checkpoint(run, folder)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return time.perf_counter() - started


# Slow: 50 kills; test_checkpoint.py kills at each point between shards and tracker.
@pytest.mark.slow
def test_50_kills(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [duration] = run_ranks(1, _save_and_die, str(tmp_path / "whole"), None)
    run_ranks(1, save_at, str(tmp_path / "save"), [1], FLAGS)
    before = file_hashes(tmp_path / "save" / "iter_0000001")
    loaded, killed = [], 0
    for point in range(POINTS):
        try:
            [taken] = run_ranks(1, _save_and_die, str(tmp_path / "save"), duration * (point + 1) / POINTS)
            duration = min(duration, taken)  # the first one may have been measured on a busier machine
        except RankError as error:
            if "exit code -14" not in str(error):
                raise
            killed += 1
        assert file_hashes(tmp_path / "save" / "iter_0000001") == before
        [(iteration, _)] = run_ranks(1, load, str(tmp_path / "save"), FLAGS)
        assert iteration in saved_iterations(tmp_path / "save")
        if iteration == 2:  # the name came before the end: begin again from one checkpoint
            # The metadata names the save; the tensors are the same.
            shards = [(tmp_path / run / "iter_0000002" / "__0_0.distcp").read_bytes() for run in ("save", "whole")]
            assert shards[0] == shards[1]
            (tmp_path / "save" / "iter_0000002").rename(tmp_path / f"done{point}")
            (tmp_path / "save" / TRACKER).write_text("1")
        loaded.append(iteration)
    with capsys.disabled():
        print(f"\n{killed} kills in {duration:.3f} s: {loaded.count(1)} loaded the old one, {loaded.count(2)} the new")
    assert killed > POINTS / 2
    assert loaded.count(1) > 0
