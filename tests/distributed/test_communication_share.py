"""--log-communication-share and --profile: known waits between real ranks, and a real run with and without them."""

import shlex
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.device.cpu import CpuDevice
from megatron_ext.telemetry.communication_clock import CommunicationClock
from megatron_ext.untrusted.metrics_rows import read_rows
from megatron_ext.verify.ranks import run_ranks
from tests.support.launched import reproducible_rows
from tests.support.program import run_program

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


FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 61
    --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3 --eval-interval 0 --log-interval 2
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --use-distributed-optimizer
""")
WATCHED = shlex.split("""
    --log-communication-share --profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 3
    --profile-ranks 1
""")


def train(folder: str, name: str, flags: list[str]) -> int:
    """Rank 3 writes."""
    files = ["--metrics-file", f"{folder}/{name}.jsonl", "--tensorboard-dir", f"{folder}/{name}"]
    return run_program([*FLAGS, *flags, *files]).code


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, flags in (("plain", []), ("watched", WATCHED)):
        assert run_ranks(4, train, str(folder), name, flags) == [0] * 4
    return folder


def test_nothing_that_is_trained_changes(folder: Path) -> None:
    assert reproducible_rows(folder / "watched.jsonl") == reproducible_rows(folder / "plain.jsonl")


def test_shares_are_logged(folder: Path) -> None:
    assert [row["time_shares"] for row in read_rows(folder / "plain.jsonl")] == [None] * 3
    for row in read_rows(folder / "watched.jsonl"):
        assert set(row["time_shares"]) == {"compute", "communication", "idle"}
        assert sum(row["time_shares"].values()) == pytest.approx(1.0, abs=1e-12)
        assert min(row["time_shares"].values()) > 0.0


def test_shares_are_in_tensorboard(folder: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tags = [set(EventAccumulator(str(folder / name)).Reload().Tags()["scalars"]) for name in ("plain", "watched")]
    assert tags[1] - tags[0] == {"compute-share", "communication-share", "idle-share"}


def test_the_trace_of_the_one_rank_that_was_named(folder: Path) -> None:
    assert [path.name for path in (folder / "watched" / "profile").iterdir()] == ["rank1.json"]
    assert "gloo:all_reduce" in (folder / "watched" / "profile" / "rank1.json").read_text()
