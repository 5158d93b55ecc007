"""Every way in which a run ends before or at its plan, with the real program."""

import json
import re
import signal
from pathlib import Path

import pytest

from benchmarks.killed_training import last_iteration
from megatron_ext.untrusted.metrics_rows import read_rows
from megatron_ext.verify.ranks import run_ranks
from tests.support.launched import end_all, start, wait_until
from tests.support.program import TINY, run_program
from tests.support.watched_ranks import fork_program

FLAGS = [*TINY, "--log-interval", "1"]
# The length of the decay, so that it does not follow from that of the run, which changes.
CURVE = ["--lr-decay-iters", "100000"]


def iterations(save: Path) -> list[int]:
    return [row["iteration"] for row in read_rows(save / "metrics.jsonl")]


# test_restarts.py stops two ranks of torchrun by one's signal in every run.
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_saves_the_step_and_ends_with_75(ranks: int, tmp_path: Path) -> None:
    torchrun = ["--nproc-per-node", str(ranks)] if ranks > 1 else []
    save, log = tmp_path / "save", tmp_path / "log"
    process = start([*FLAGS, "--train-iters", "100000", "--save", str(save)], log, torchrun)
    try:
        wait_until(lambda: last_iteration(save) >= 5, log, process)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    finally:
        end_all(process)
    last = iterations(save)[-1]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == str(last), "a step was lost"
    if ranks == 1:
        assert code == 75
        assert log.read_text().splitlines()[-1].startswith("rank 0: stopped at iteration")
    record = json.loads((save / "exit.json").read_text())
    assert record["code"] == 75
    assert "SIGTERM" in record["message"]


def test_a_stop_file_saves_and_ends_with_75_and_the_next_start_goes_on(tmp_path: Path) -> None:
    save, log = tmp_path / "save", tmp_path / "log"
    process = start([*FLAGS, *CURVE, "--train-iters", "100000", "--save", str(save)], log)
    try:
        wait_until(lambda: last_iteration(save) >= 3, log, process)
        (save / "stop").touch()
        assert process.wait(60) == 75
    finally:
        end_all(process)
    last = iterations(save)[-1]
    more = ["--train-iters", str(last + 2), "--save", str(save), "--load", str(save)]
    [again] = run_ranks(1, run_program, [*FLAGS, *CURVE, *more])
    assert again.code == 0, again.errors
    assert iterations(save) == list(range(1, last + 3))
    record = json.loads((save / "exit.json").read_text())
    assert (record["code"], record["message"]) == (0, f"rank 0: done at iteration {last + 2}")


def test_exit_interval_duration_and_samples(tmp_path: Path) -> None:
    for name, flags, steps in (
        ("interval", ["--train-iters", "100", "--exit-interval", "7"], 7),
        # 30 samples are seven steps of four; an eighth would need more than there are.
        ("samples", ["--train-samples", "30"], 7),
        ("duration", ["--train-iters", "100", "--exit-duration-in-mins", "1e-6"], 1),
    ):
        save = tmp_path / name
        [ended] = run_ranks(1, run_program, [*FLAGS, *flags, "--save", str(save)])
        assert ended.code == 0, ended.errors
        assert iterations(save) == list(range(1, steps + 1)), name
        assert (f"stopped: --exit-{name}" in ended.output) == (name != "samples")
        assert (save / "latest_checkpointed_iteration.txt").read_text() == str(steps)


def test_a_save_that_does_not_fit_the_deadline_is_given_up(tmp_path: Path) -> None:
    """Rank 1's disk does not answer, and the main thread of rank 0 waits for it in C++."""
    save = tmp_path / "save"
    flags = [*FLAGS, "--train-iters", "100000", "--save-interval", "3", "--save", str(save)]
    deadline = ["--exit-signal-deadline", "4"]
    [ranks] = run_ranks(1, fork_program, 2, [*flags, *deadline], tmp_path, "hang_in_save", 1, True)
    record = json.loads((save / "exit.json").read_text())
    assert re.search(
        r"^rank [01]: stopped at iteration \d+: SIGTERM; --exit-signal-deadline 4 \(seconds\) is over before this step "
        r"was saved; the newest checkpoint in .*save is that of iteration 3; start again with --load ",
        record["message"],
    )
    assert [line for rank in ranks for line in rank.last_words] == [record["message"]], "one rank says it"
    assert record["code"] == 75
    codes = {rank.code for rank in ranks}
    assert 75 in codes
    assert codes <= {75, 76}, "76: it lost the one that had said why"
    # The signal comes half a second after the mark; the disk would answer after minutes. How punctual the deadline is,
    # tests/unit/resilience/test_signals_deadline.py says by a clock that no other work delays.
    assert max(rank.ended for rank in ranks) - (tmp_path / "fault").stat().st_mtime < 0.5 + 4.0 + 10.0
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "3"
