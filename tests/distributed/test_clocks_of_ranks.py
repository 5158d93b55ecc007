"""What ranks' clocks tell of known waits, and of real runs: --log-communication-share and --profile, and
--log-straggler, which names who becomes slow in log, TensorBoard and the run's page.
"""

import itertools
import re
import shlex
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext import environment
from megatron_ext.device.cpu import CpuDevice
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.pages.loss_curve import read_history, summary
from megatron_ext.plugins.pages.run_page import run_page
from megatron_ext.plugins.rank_times.communication_clock import CommunicationClock, ComputeTime
from megatron_ext.train.trainer import Trainer
from megatron_ext.untrusted.metrics_rows import read_rows
from tests.support.launched import reproducible_rows
from tests.support.program import run_program, tiny

# Of the second tier: tests/unit/telemetry computes the shares.
pytestmark = pytest.mark.full

LATE = 0.6  # seconds


def known_waits() -> list[tuple[float, ...]]:
    """Seconds (communication, idle, whole) on this rank, of steps in which rank 1 keeps rank 0 waiting."""
    torch.distributed.init_process_group("gloo")
    first, pipeline = torch.distributed.get_rank() == 0, torch.distributed.new_group([0, 1])
    assert isinstance(pipeline, torch.distributed.ProcessGroup)
    tensor, plain = torch.ones(8), torch.distributed.ProcessGroup.allreduce

    def late_all_reduce() -> None:
        time.sleep(0.0 if first else LATE)
        torch.distributed.all_reduce(tensor)

    def late_message(group: Any) -> None:
        if first:
            torch.distributed.recv(tensor, src=1, group=group)
        else:
            time.sleep(LATE)
            torch.distributed.send(tensor, dst=0, group=group)

    def behind_computation() -> None:
        work = torch.distributed.all_reduce(tensor, async_op=True)
        assert work is not None
        time.sleep(LATE)
        work.wait()

    def batched_messages() -> None:
        time.sleep(0.0 if first else LATE)
        other = torch.empty(8)
        peer = 1 if first else 0
        operations = [
            torch.distributed.P2POp(torch.distributed.isend, tensor, peer, group=pipeline),
            torch.distributed.P2POp(torch.distributed.irecv, other, peer, group=pipeline),
        ]
        for work in torch.distributed.batch_isend_irecv(operations):
            work.wait()

    clock = CommunicationClock(CpuDevice(), pipeline)
    clock.start()
    seconds = []
    messages = (lambda: late_message(pipeline), lambda: late_message(None), batched_messages)
    for work in (late_all_reduce, behind_computation, *messages):
        torch.distributed.barrier()  # outside of a step: not counted
        clock.begin_step()
        work()
        clock.end_step()
        seconds.append(tuple(clock.take().tolist()))
    clock.stop()
    assert torch.distributed.ProcessGroup.allreduce is plain
    torch.distributed.all_reduce(tensor)  # a method again
    return seconds


def test_known_waits() -> None:
    late, behind, message, other_message, batched = run_ranks(2, known_waits)[0]
    for waited, other, whole in (late, other_message, message[1::-1] + message[2:], batched[1::-1] + batched[2:]):
        assert LATE / 3 < waited <= whole
        assert other == 0.0
    communication, idle, whole = behind
    assert whole >= LATE
    assert communication < LATE / 3, "it travelled while the rank computed"
    assert idle == 0.0


def _files(folder: Path, name: str) -> list[str]:
    return ["--metrics-file", f"{folder}/{name}.jsonl", "--tensorboard-dir", f"{folder}/{name}"]


def _added_tags(folder: Path) -> tuple[set[str], Any]:
    """The tags in TensorBoard that only the watched run has, and its events."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    plain, watched = (EventAccumulator(str(folder / name)).Reload() for name in ("plain", "watched"))
    return set(watched.Tags()["scalars"]) - set(plain.Tags()["scalars"]), watched


DIVIDED = """
    --train-iters 4 --log-interval 2 --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 2 --use-distributed-optimizer
"""
WATCHED = shlex.split("""
    --log-communication-share --profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 3
    --profile-ranks 1
""")


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a run without and of one with shares, written by the last of four ranks."""
    folder = tmp_path_factory.mktemp("shares")
    for name, flags in (("plain", []), ("watched", WATCHED)):
        ended = run_ranks(4, run_program, [*tiny(DIVIDED), *flags, *_files(folder, name)])
        assert [one.code for one in ended] == [0] * 4
    return folder


@pytest.mark.parametrize("watched", ["shares", "stragglers"])
def test_nothing_that_is_trained_changes(watched: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(watched)
    assert reproducible_rows(folder / "watched.jsonl") == reproducible_rows(folder / "plain.jsonl")


def test_shares_are_logged(shares: Path) -> None:
    assert [row["time_shares"] for row in read_rows(shares / "plain.jsonl")] == [None] * 3
    for row in read_rows(shares / "watched.jsonl"):
        assert set(row["time_shares"]) == {"compute", "communication", "idle"}
        assert sum(row["time_shares"].values()) == pytest.approx(1.0, abs=1e-12)
        assert min(row["time_shares"].values()) > 0.0


def test_shares_are_in_tensorboard(shares: Path) -> None:
    added, _ = _added_tags(shares)
    assert added == {"compute-share", "communication-share", "idle-share"}


def test_the_trace_of_the_one_rank_that_was_named(shares: Path) -> None:
    assert [path.name for path in (shares / "watched" / "profile").iterdir()] == ["rank1.json"]
    assert "gloo:all_reduce" in (shares / "watched" / "profile" / "rank1.json").read_text()


COMPUTE, SLOW = 0.015, 0.03  # seconds of a step that every rank computes, and the slow one
SLOW_FROM, STEPS = 24, 44
ONE_LAYER = f"--num-layers 1 --global-batch-size 3 --train-iters {STEPS} --log-interval 4"


def _slowly(flags: list[str], how: str) -> tuple[int, str]:
    """Rank 1 computes longer from a step on, by what its clock says ("told") or in fact ("real")."""
    rank, steps = environment.rank(), itertools.count(1)
    step, compute_time = Trainer.begin_step, CommunicationClock._compute_time

    def told(self: CommunicationClock, step: Any, seconds: float) -> ComputeTime:
        seconds = SLOW if rank == 1 and next(steps) >= SLOW_FROM else COMPUTE
        return ComputeTime(seconds, seconds, 3e-5)

    def real(self: Trainer) -> Any:
        slowed = rank == 1 and self.run.state.iteration + 1 >= SLOW_FROM
        until = time.thread_time() + (SLOW if slowed else COMPUTE)
        while time.thread_time() < until:
            pass
        return step(self)

    if how == "told":
        CommunicationClock._compute_time = told
    if how == "real":
        Trainer.begin_step = real
    try:
        ended = run_program([*tiny(ONE_LAYER), *flags])
    finally:
        Trainer.begin_step, CommunicationClock._compute_time = step, compute_time
    return ended.code, ended.output


def straggler_lines(ends: list[tuple[int, str]]) -> list[str]:
    assert [code for code, _ in ends] == [0] * 3
    return re.findall("^straggler .*", ends[-1][1], re.MULTILINE)


@pytest.fixture(scope="module")
def stragglers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stragglers")
    assert straggler_lines(run_ranks(3, _slowly, _files(folder, "plain"), "")) == []
    lines = straggler_lines(run_ranks(3, _slowly, [*_files(folder, "watched"), "--log-straggler"], "told"))
    (folder / "lines").write_text("\n".join(lines))
    return folder


def test_the_slow_rank_is_named_once_and_in_time(stragglers: Path) -> None:
    """Its eleventh slow step is exchanged with the one after it, at the end of the next, and read at the end of
    another one."""
    named = SLOW_FROM + 10 + 3
    assert (stragglers / "lines").read_text() == (
        f"straggler at iteration {named}: rank 1 ({socket.gethostname()}) computes 2.00 times as long as its peers: "
        "30.0 ms of a step, ranks 0, 2 15.0 ms"
    )


@pytest.mark.slow  # by the machine's own clock: other programs must leave three ranks their cores
def test_a_rank_that_is_slow_indeed_is_named() -> None:
    (line,) = straggler_lines(run_ranks(3, _slowly, ["--log-straggler"], "real"))
    found = re.match(r"straggler at iteration (\d+): rank 1 \(\S+\) computes (\d\.\d\d) times as long", line)
    assert found, line
    assert SLOW_FROM < int(found[1]) < SLOW_FROM + 20, "the twentieth slow step is the last in which it may be"
    assert 1.2 <= float(found[2]) < 2.2


def test_metrics_tensorboard_and_the_page_tell_it(stragglers: Path) -> None:
    assert {row["slowest_rank"] is None for row in read_rows(stragglers / "plain.jsonl")} == {True}
    last = list(read_rows(stragglers / "watched.jsonl"))[-1]["slowest_rank"]
    assert last == {"rank": 1, "ratio": 2.0, "slow": [1]}
    added, watched = _added_tags(stragglers)
    assert added == {"slowest-rank", "slowest-rank-ratio", "slow-ranks"}
    assert [(event.step, event.value) for event in watched.Scalars("slow-ranks")][-1] == (STEPS, 1.0)
    history = read_history(stragglers / "watched.jsonl")
    (said,) = (line for line in summary(history) if line.startswith("slow rank"))
    assert re.fullmatch(rf"slow rank +1, in \d+ rows? from iteration \d+ to {STEPS}", said), said
    assert "Slowest rank" in run_page(history, "run")
    assert "Slowest rank" not in run_page(read_history(stragglers / "plain.jsonl"), "run")
