"""Starts the ranks of a training, kills some of them, and starts all of them again: torchrun, or a stand-in that forks.

Both lend all attempts the same store, and end the ranks that are left after a kill with SIGTERM. A rank that outlives
that by 10 seconds is killed, and counted: none should.
"""

import contextlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from megatron_ext.forkserver.ranks import forkserver

_ROOT = Path(__file__).resolve().parents[1]
_PATIENCE = 10.0  # seconds that a rank may take to end
_RESUMED = re.compile(rb"checkpoint: (?:resuming at iteration (\d+)|starting afresh)")


class Launcher(ABC):
    """Starts and kills the ranks of one training.

    Args:
        words: the flags of pretrain_gpt.py.
        ranks: how many.
        log: file of what the ranks print, in a folder that is made.
    """

    has_agent = False
    """Whether there is an agent, which can be killed."""
    typical_start = 1.0
    """Seconds from a start to the first step, about."""

    def __init__(self, words: Sequence[str], ranks: int, log: Path):
        self.words, self.ranks, self.log = list(words), ranks, log
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        self.lost_with_rank: str | None = None
        """Folder that is lost with a rank that is killed, `{rank}` in it standing for its number: the memory of a
        machine. With it, each rank believes to be on a machine of its own."""
        self._read_from = 0

    @abstractmethod
    def start(self) -> None:
        """Start all ranks."""

    @abstractmethod
    def kill(self, ranks: Sequence[int], ranks_then: int) -> int:
        """Kill (SIGKILL) these ranks, or without any the agent, and have `ranks_then` ranks started.

        Returns:
            How many other ranks had to be killed because they did not end in time.
        """

    @abstractmethod
    def finished(self) -> bool:
        """Return whether the training has come to its planned end."""

    @abstractmethod
    def failed(self) -> bool:
        """Return whether it has ended in another way."""

    @abstractmethod
    def end(self) -> None:
        """Kill whatever is left."""

    def resumed_at(self) -> int | None:
        """Return the iteration that the ranks of this attempt go on from, once rank 0 has said it."""
        with self.log.open("rb") as file:
            file.seek(self._read_from)
            found = _RESUMED.search(file.read())
        return int(found[1] or 0) if found else None

    def end_of_log(self) -> str:
        """Return the last lines that the ranks printed."""
        return self.log.read_text(errors="replace")[-4000:]


class ForkedRanks(Launcher):
    """Forks the ranks from a server with torch loaded, and does what torchrun's agent does with them."""

    typical_start = 2.0

    def __init__(self, words: Sequence[str], ranks: int, log: Path):
        super().__init__(words, ranks, log)
        import torch

        self._store = torch.distributed.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
        )
        self._processes: list[Any] = []

    def start(self) -> None:
        self._read_from = self.log.stat().st_size
        self._processes = []
        for rank in range(self.ranks):
            words = [word.replace("{rank}", str(rank)) for word in self.words]
            arguments = (self._settings(rank), words, str(self.log))
            process = forkserver().Process(target=_pretrain, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)

    def _settings(self, rank: int) -> dict[str, str]:
        here = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.ranks)}
        if self.lost_with_rank is not None:
            here = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "OMP_NUM_THREADS": "1",
            **here,
        }

    def kill(self, ranks: Sequence[int], ranks_then: int) -> int:
        for rank in ranks:
            self._processes[rank].kill()
        for rank in ranks:
            self._processes[rank].join()
            if self.lost_with_rank is not None:
                shutil.rmtree(self.lost_with_rank.replace("{rank}", str(rank)), ignore_errors=True)
        others = [process for number, process in enumerate(self._processes) if number not in ranks]
        late = _terminated(others, _PATIENCE).count(None)
        self.end()
        self.ranks = ranks_then
        self.start()
        return late

    def stop(self, seconds: float) -> list[int | None]:
        """Send SIGTERM to all ranks; return their exit codes, None for those that did not end within `seconds`."""
        return _terminated(self._processes, seconds)

    def finished(self) -> bool:
        return all(process.exitcode == 0 for process in self._processes)

    def failed(self) -> bool:
        return any(process.exitcode not in (0, None) for process in self._processes)

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _terminated(processes: Sequence[Any], seconds: float) -> list[int | None]:
    """Send SIGTERM, and return the exit codes; None for who lives on after so many seconds."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]


def _pretrain(settings: dict[str, str], words: list[str], log: str) -> None:
    """Be a rank of the program, with its output at the end of `log`."""
    os.environ.update(settings)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    import torch

    torch.set_num_threads(1)
    sys.argv = ["pretrain_gpt.py", *words]
    runpy.run_path(str(_ROOT / "pretrain_gpt.py"), run_name="__main__")


class Torchrun(Launcher):
    """torchrun itself, with restarts enough for every kill."""

    has_agent = True
    typical_start = 8.0

    def __init__(self, words: Sequence[str], ranks: int, log: Path):
        super().__init__(words, ranks, log)
        self._agent: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._read_from = self.log.stat().st_size
        environment = {**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1"}
        launch = ["--standalone", "--nproc-per-node", str(self.ranks), "--max-restarts", "1000", "-m", "megatron_ext"]
        with self.log.open("ab") as output:
            self._agent = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *launch, "pretrain", *self.words],
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def kill(self, ranks: Sequence[int], ranks_then: int) -> int:
        assert self._agent is not None
        assert ranks_then == self.ranks, "torchrun starts as many as before"
        before = self._rank_processes()
        if not ranks or not before.keys() >= set(ranks):  # while it starts them there are none: the agent, then
            self._agent.kill()
            self._agent.wait()
            _, late = psutil.wait_procs(list(before.values()), timeout=_PATIENCE)
            for process in late:  # in sessions of their own
                process.kill()
            self.end()
            self.start()
            return len(late)
        self._read_from = self.log.stat().st_size
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                before[rank].kill()
        _, late = psutil.wait_procs(list(before.values()), timeout=_PATIENCE)
        return len(late)

    def finished(self) -> bool:
        return self._agent is not None and self._agent.poll() == 0

    def failed(self) -> bool:
        return self._agent is not None and self._agent.poll() not in (0, None)

    def end(self) -> None:
        if self._agent is None:
            return
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._agent.pid).children(recursive=True):
                process.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._agent.pid, signal.SIGKILL)
        self._agent.wait()

    def _rank_processes(self) -> dict[int, psutil.Process]:
        assert self._agent is not None
        found = {}
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self._agent.pid).children():
                with contextlib.suppress(psutil.Error, KeyError, ValueError):
                    found[int(process.environ()["RANK"])] = process
        return found


LAUNCHERS: dict[str, type[Launcher]] = {"torchrun": Torchrun, "forkserver": ForkedRanks}
"""The launchers, by the names of --launcher."""
