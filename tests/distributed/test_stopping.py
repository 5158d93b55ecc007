"""Every way in which a run ends before or at its plan; what one rank sees, all ranks do at the same step."""

import json
import os
import re
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.distributed_c10d import _world

from benchmarks.killed_training import last_iteration
from megatron_ext import device
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parallel import groups
from megatron_ext.resilience.signals import SignalWatcher
from megatron_ext.train.callbacks.stopping import Stopping
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.launched import end_all, start, wait_until
from tests.support.program import run_program, tiny
from tests.support.watched_ranks import fork_program

FLAGS = tiny("--log-interval 1")
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


@pytest.mark.full
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


EVENTS = ("SIGTERM", "SIGINT", "stop file", "deadline")
ON_ALL = "SIGTERM on all"
REASONS = {"SIGTERM": "SIGTERM", "SIGINT": "SIGINT", "deadline": "--exit-duration-in-mins is over"}


def _stops(event: str, file: Path) -> list[list[tuple[str, bool, bool]]]:
    """On one of two ranks: what the trainer is told after a step without, and one with the event on rank 1, and
    whether the stop is one for all restarts where SIGTERM is none."""
    sees = torch.distributed.get_rank() == 1
    told: list[tuple[str, bool, bool]] = []
    trainer: Any = SimpleNamespace(
        run=SimpleNamespace(
            world_size=2, device=SimpleNamespace(torch_device="cpu"), state=SimpleNamespace(iteration=3)
        ),
        stop_votes=None,
    )
    with SignalWatcher(stop_file=file if sees and event == "stop file" else None) as watcher:
        stopping = Stopping(watcher, None, 10.0, elastic=True)
        trainer.stop = lambda reason, by_signal=False: told.append((reason, by_signal, watcher.for_good))
        stopping.on_step_end(trainer, None)  # pyright: ignore[reportArgumentType]
        before = list(told)
        if sees and event == "deadline":
            stopping.deadline = time.monotonic()
        elif sees and event == "stop file":
            file.touch()
        elif event == ON_ALL:
            os.kill(os.getpid(), signal.SIGTERM)
        elif sees:
            os.kill(os.getpid(), getattr(signal, event))
        stopping.on_step_end(trainer, None)  # pyright: ignore[reportArgumentType]
    return [before, told]


def _all_events(folder: str) -> tuple[list[list[list[tuple[str, bool, bool]]]], set[timedelta]]:
    """The same for every event, and the time limits of all groups of a layout with a limit of 7 minutes."""
    layout = LayoutConfig(world_size=2, tensor_model_parallel_size=2, distributed_timeout_minutes=7.0)
    groups.initialize(layout, device.install("cpu"))
    made: Any = list(_world.pg_map)
    limits = {group._get_backend(torch.device("cpu")).options._timeout for group in made}
    assert len(made) > 3
    return [_stops(event, Path(folder) / "stop") for event in (*EVENTS, ON_ALL)], limits


def test_all_ranks_stop_for_what_rank_1_alone_has_seen(tmp_path: Path) -> None:
    (first, limits), (second, also) = run_ranks(2, _all_events, str(tmp_path))
    # torchrun takes all ranks down by SIGTERM: a stop for this launch, however many have seen it.
    assert first.pop() == second.pop() == [[], [("SIGTERM", True, False)]]
    for event, (before, told), (before_too, told_too) in zip(EVENTS, first, second, strict=True):
        assert before == before_too == [], event
        [(reason, by_signal, for_good)], [(said, by_signal_too, for_good_too)] = told, told_too
        assert by_signal == by_signal_too == (event != "deadline"), event
        assert for_good == for_good_too == (event != "SIGTERM"), event
        assert said == REASONS.get(event, f"the file {tmp_path / 'stop'}")
        assert reason == (said if event == "deadline" else "another rank was asked to stop")
    # torch's limit is 5 s after that of the watch, which says who is to blame.
    assert limits == also == {timedelta(minutes=7, seconds=5)}
