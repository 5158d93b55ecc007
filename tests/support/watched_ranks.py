"""pretrain_gpt.py on ranks that may hang, crash or be killed: forked from a rank of `run_ranks`, which outlives them.

Nobody collects an ended rank before all have ended, as a launcher that looks now and then does.
"""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

SECONDS = 60.0
PAUSE = 7.5


@dataclass(frozen=True)
class WatchedRank:
    """How a rank ended: its exit code (negative: the signal), what it wrote, and when (time.time())."""

    code: int
    output: str
    ended: float

    @property
    def last_words(self) -> list[str]:
        """The lines that say why the run ended."""
        return [line for line in self.output.splitlines() if line.startswith("rank ")]


def fork_program(
    ranks: int, argv: Sequence[str], logs: Path, fault: str, faulty: int, terminate: bool = False
) -> list[WatchedRank]:
    """Run the program on as many forked ranks, one of which is faulty in step 4.

    Args:
        argv: flags.
        logs: folder for the ranks' output; `fault` there is made when the fault happens.
        fault: a function of this file.
        faulty: the rank.
        terminate: whether all ranks get SIGTERM a moment after the fault.
    """
    children = [_fork(rank, ranks, argv, logs, fault if rank == faulty else None) for rank in range(ranks)]
    ended: dict[int, float] = {}
    deadline = time.monotonic() + SECONDS
    while len(ended) < ranks and time.monotonic() < deadline:
        time.sleep(0.01)
        for child in children:
            if child not in ended and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                ended[child] = time.time()
        if terminate and (logs / "fault").exists():
            terminate = False
            time.sleep(0.5)
            for child in children:
                os.kill(child, signal.SIGTERM)
    results = []
    for rank, child in enumerate(children):
        if child not in ended:
            os.kill(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        output = (logs / f"rank-{rank}.log").read_text(errors="replace")
        results.append(WatchedRank(code if child in ended else -999, output, ended.get(child, time.time())))
    return results


def _fork(rank: int, ranks: int, argv: Sequence[str], logs: Path, fault: str | None) -> int:
    child = os.fork()
    if child:
        return child
    try:
        log = os.open(logs / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        _main(rank, [*argv, "--device", "cpu", "--num-workers", "0"], logs, fault)
    finally:
        os._exit(99)


def _main(rank: int, argv: Sequence[str], logs: Path, fault: str | None) -> None:
    from megatron_ext.resilience.process_end import RunStatus, end_process, run_guarded
    from pretrain_gpt import main

    if fault is not None:
        globals()[fault](logs / "fault")
    status = RunStatus(rank=rank)
    code = run_guarded(lambda: main(argv, status), status)
    sys.stdout.flush()
    sys.stderr.flush()
    if code == 0:
        os._exit(0)
    end_process(code)


def stop(mark: Path) -> None:
    """The process is stopped."""
    _in_step_4(mark, lambda: os.kill(os.getpid(), signal.SIGSTOP))


def pause_all(mark: Path) -> None:
    """All ranks are stopped for longer than any time limit of theirs, and go on, as when a scheduler suspends a job."""

    def pause() -> None:
        ranks = psutil.Process(os.getppid()).children()
        if os.fork() == 0:
            for signals in (signal.SIGSTOP, signal.SIGCONT):
                for rank in ranks:
                    rank.send_signal(signals)
                time.sleep(PAUSE)
            os._exit(0)
        time.sleep(0.2)

    _in_step_4(mark, pause)


def leave(mark: Path) -> None:
    """The process ends without a word."""
    _in_step_4(mark, lambda: os._exit(3))


def crash(mark: Path) -> None:
    """The process crashes."""
    _in_step_4(mark, lambda: os.kill(os.getpid(), signal.SIGSEGV))


def die_in_load(mark: Path) -> None:
    """The process is killed when it reads the tensors of the checkpoint of --load."""
    from megatron_ext.checkpoint.native.safe_reading import SafeReader

    def dying(*_: Any) -> Any:
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)

    SafeReader.read_data = dying  # pyright: ignore[reportAttributeAccessIssue]


def hang_in_save(mark: Path) -> None:
    """No save ends from step 4 on."""
    from megatron_ext.checkpoint.native import save

    def hung_save(*args: Any, **kwargs: Any) -> None:
        time.sleep(600)

    _in_step_4(mark, lambda: setattr(save, "write_shards", hung_save))


def sleep_in_loader(mark: Path) -> None:
    """The batch never comes."""
    from megatron_ext.data.loader import BatchLoader

    load = BatchLoader.global_batch
    calls = [0]

    def hung_loader(self: BatchLoader, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            mark.touch()
            time.sleep(600)
        return load(self, *args, **kwargs)

    BatchLoader.global_batch = hung_loader


def skip_reduction(mark: Path) -> None:
    """The rank leaves out the reduction of the gradients, and goes on to the collectives of the update; it is slow to
    hear why the run ends, so that the others leave before it."""
    from megatron_ext.resilience.rank_reports import Board
    from megatron_ext.train import build

    reduce, verdict = build.finalize_model_grads, Board.verdict
    calls = [0]

    def late_verdict(self: Board, seconds: float) -> Any:
        time.sleep(1.5)
        return verdict(self, seconds)

    def skipping(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            mark.touch()
            return None
        return reduce(*args, **kwargs)

    build.finalize_model_grads = skipping
    Board.verdict = late_verdict


def _in_step_4(mark: Path, happens: Any) -> None:
    from megatron_ext.train.trainer import Trainer

    step = Trainer.begin_step

    def faulty_step(self: Trainer) -> Any:
        if self.run.state.iteration == 3:
            mark.touch()
            happens()
        return step(self)

    Trainer.begin_step = faulty_step
