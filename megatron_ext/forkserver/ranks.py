"""Runs a function on real ranks: forked processes that talk over gloo, exactly as under torchrun.

    losses = run_ranks(4, train_ten_steps, flags)     # one result per rank

The processes come from a forkserver that has torch and megatron-core imported, so that eight ranks start in
well under a second. They find each other through a store that the parent owns, as torchrun's workers do.
"""

import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

PRELOADED = ["megatron_ext.forkserver.preload"]
"""Modules that the forkserver imports before the first rank is forked; a test module adds the modules that it needs."""


class RankError(AssertionError):
    """Raised where a rank raised, or died. `tracebacks` holds the traceback of each failing rank, first failure
    first."""

    def __init__(self, tracebacks: Sequence[tuple[int, str]]):
        self.tracebacks = list(tracebacks)
        super().__init__("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in self.tracebacks))


def run_ranks(
    world_size: int,
    function: Callable[..., Any],
    *arguments: Any,
    timeout: float = 300.0,
    environment: dict[str, str] | None = None,
    fresh: bool = False,
) -> list[Any]:
    """Call `function(*arguments)` on every rank and return the results in the order of the ranks.

    Args:
        world_size: number of processes.
        function: importable by name, with `fresh` from another module than the main script; it may call
            `torch.distributed.init_process_group()` with no arguments.
        timeout: seconds until all ranks are killed.
        environment: further variables for the ranks.
        fresh: start each rank in an interpreter of its own, with nothing imported or adapted.
    Raises:
        RankError: a rank raised or ended without a result; the others are then killed.
    """
    import torch

    context = multiprocessing.get_context("spawn") if fresh else forkserver()
    store = torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout)
    )
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    processes, pipes = [], []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        settings = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        process = context.Process(target=_rank_main, args=(sender, settings, function, arguments), daemon=False)
        with _no_main_script() if fresh else nullcontext():
            process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        return _collect(pipes, processes, timeout)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()


@contextmanager
def _no_main_script() -> Iterator[None]:
    """Return a context in which a spawned process does not run this process's main script once more, which may be a
    user's, without `if __name__ == "__main__"`."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = nothing = ModuleType("__main__")
    nothing.__spec__ = None
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def forkserver() -> Any:
    """Return the context of processes that are forked from a server with torch and the program loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def _collect(pipes: list[Connection], processes: list[Any], timeout: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    failures: list[tuple[int, str]] = []
    pending = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline = time.monotonic() + timeout
    while pending:
        # After a failure the peers get a moment to say what they saw; then they are killed.
        left = deadline - time.monotonic()
        ready = wait(list(pending), timeout=max(0.0, min(left, 2.0) if failures else left))
        if not ready:
            break
        for pipe in ready:
            rank = pending.pop(pipe)  # pyright: ignore[reportArgumentType]
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())  # pyright: ignore[reportAttributeAccessIssue]
            except EOFError:
                processes[rank].join(1.0)
                failures.append((rank, f"ended without a result, exit code {processes[rank].exitcode}"))
                continue
            if succeeded:
                results[rank] = value
            else:
                failures.append((rank, value))
    if failures:
        raise RankError(failures)
    if pending:
        raise RankError([(rank, f"no result within {timeout:.0f} s") for rank in sorted(pending.values())])
    return results


def _rank_main(sender: Connection, settings: dict[str, str], function: Callable[..., Any], arguments: tuple) -> None:
    os.environ.update(settings)
    import torch

    torch.set_num_threads(int(settings["OMP_NUM_THREADS"]))
    try:
        answer = (True, function(*arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    sender.send_bytes(pickle.dumps(answer))
    sender.close()
    if torch.distributed.is_initialized() and answer[0]:
        torch.distributed.destroy_process_group()
