"""Ranks of one machine see each other's processes: whether they live, how they ended, and whether they are stopped.

Linux tells a process that holds a descriptor of another (pidfd) when it ends. How it ended (the code or the signal)
stands in /proc until its parent has collected it, and from Linux 6.15 on the descriptor tells it afterwards. So the
first cause of a lost rank is known even if the rank could not report it.
"""

import contextlib
import os
import select
import signal
import socket
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

_LAUNCH = "TORCHELASTIC_RUN_ID"

# linux/pidfd.h: PIDFD_GET_INFO = _IOWR(0xFF, 11, struct pidfd_info), of 64 bytes in its first version; the request
# and the answer begin with a mask, the exit status is the last field.
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO = struct.Struct("=QQ11Ii")
# Fields of /proc/PID/stat after the name, which may hold spaces (man 5 proc_pid_stat counts from 1: these from 3).
_STATE, _START_TIME, _EXIT_STATUS = 0, 19, 49


@dataclass(frozen=True)
class ProcessName:
    """Names one process of one machine, for ever: process ids are used again."""

    pid: int
    host: str
    """The machine's readable name."""

    machine: str
    """Boot and process namespace: equal for two processes only where they can see each other by `pid`."""

    start_time: int
    """Start of the process in clock ticks after the boot; 0 where it is not known."""

    @classmethod
    def own(cls) -> "ProcessName":
        """Return the name of this process."""
        fields = _stat(os.getpid())
        return cls(os.getpid(), socket.gethostname(), _machine(), int(fields[_START_TIME]) if fields else 0)

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "ProcessName":
        """Return the name from its `as_json` form."""
        return cls(**fields)

    @property
    def is_here(self) -> bool:
        """Whether the process is, or was, one of this machine."""
        return self.start_time > 0 and self.machine == _machine()

    def state(self) -> str | None:
        """Return the kernel's letter for the state of the process (T and t: stopped, Z: ended); None if it is gone."""
        fields = _stat(self.pid)
        return fields[_STATE] if fields and int(fields[_START_TIME]) == self.start_time else None

    @property
    def does_not_run(self) -> bool:
        """Whether the process, which is of this machine, is stopped or gone."""
        return self.state() in ("T", "t", "Z", None)

    def kill(self) -> None:
        """End the process, stopped or not, if it is on this machine and still exists."""
        if self.is_here and self.state() not in (None, "Z"):
            with contextlib.suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)


class PeerProcesses:
    """Watches processes of this machine. It holds one descriptor for each, until `close`."""

    def __init__(self) -> None:
        self._peers: dict[int, tuple[int, ProcessName]] = {}
        self._poll = select.poll()

    def add(self, rank: int, process: ProcessName) -> None:
        """Watch the process of a rank; does nothing where it is not of this machine, or has ended already."""
        if not process.is_here or not hasattr(os, "pidfd_open"):
            return
        try:
            descriptor = os.pidfd_open(process.pid)
        except OSError:
            return
        if process.state() is None:  # another one has its id by now
            os.close(descriptor)
            return
        self._peers[descriptor] = rank, process
        self._poll.register(descriptor, select.POLLIN)

    def also(self, descriptor: int) -> None:
        """Let `ended` return early, with nothing, when there is something to read from this descriptor."""
        self._poll.register(descriptor, select.POLLIN)

    def ended(self, seconds: float) -> dict[int, int | None]:
        """Wait for at most `seconds` until a process ends; return by rank the status that waitpid gives, or None if it
        is not known any more. Each end is returned once."""
        statuses = {}
        for descriptor, _ in self._poll.poll(1000.0 * seconds):
            if descriptor in self._peers:
                rank, process = self._peers.pop(descriptor)
                statuses[rank] = _exit_status(descriptor, process)
                self._poll.unregister(descriptor)
                os.close(descriptor)
        return statuses

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self._peers:
            os.close(descriptor)
        self._peers.clear()


def end_stopped_ranks(launcher: int | None = None) -> str:
    """Kill the ranks of this machine that are stopped, for which their launcher would wait long; return the ranks in
    words.

    For ranks that have not met yet, and know of each other only that they have one launcher.

    Args:
        launcher: its process; default the parent of this one.
    Returns:
        A sentence, which begins with a space; nothing where no rank is stopped, or torchrun is not the launcher.
    """
    launch = os.environ.get(_LAUNCH)
    ended: dict[int, int] = {}
    with contextlib.suppress(psutil.Error):
        siblings = psutil.Process(launcher or os.getppid()).children() if launch is not None else []
        for sibling in siblings:
            with contextlib.suppress(psutil.Error, ValueError):
                variables = sibling.environ()
                is_stopped = sibling.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
                if is_stopped and variables.get(_LAUNCH) == launch and "RANK" in variables:
                    sibling.kill()
                    ended[int(variables["RANK"])] = sibling.pid
    return "".join(
        f" Rank {rank} was stopped, by SIGSTOP or a debugger (process {pid})." for rank, pid in sorted(ended.items())
    )


def ranks_of_this_machine(rank: int, world_size: int) -> list[int]:
    """Return the ranks that the launcher started on the machine of `rank`; all, where it does not say."""
    try:
        local, number = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    except (KeyError, ValueError):
        return list(range(world_size))
    first = rank - local
    return list(range(max(first, 0), min(first + number, world_size)))


def exit_text(status: int | None) -> str:
    """Return how a process ended, from the status that waitpid gives."""
    if status is None:
        return "has ended, nobody saw how"
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"was killed by signal {-code}"


def _exit_status(descriptor: int, process: ProcessName) -> int | None:
    if process.state() == "Z":
        fields = _stat(process.pid)
        if fields and fields[_STATE] == "Z":
            return int(fields[_EXIT_STATUS])
    return _status_of_a_collected(descriptor)


def _status_of_a_collected(descriptor: int) -> int | None:
    """Return the exit status of a process that its parent has waited for; None before Linux 6.15."""
    import fcntl

    request = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, request)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(request)
    return status if mask & _PIDFD_INFO_EXIT else None


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: nobody is watched
        return socket.gethostname()
