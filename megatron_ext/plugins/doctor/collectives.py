"""`megatron-ext doctor --collectives` checks whether all ranks reach each other, which do not, and how fast.

There are these stages, each with a time limit: every rank comes; a process group; an all-reduce; a message around the
ring of ranks; a barrier; the speed of an all-reduce and of every link of the ring. The work is done on a thread of its
own, so that this one can say who is missing while a backend still waits.

Ranks sign in a store at every stage of a check, so that those that did not can be named.

    attendance = Attendance.open(environment, seconds=20)
    attendance.enter("all-reduce")
    ...
    attendance.leave("all-reduce")

The store is torch's own, at MASTER_ADDR:MASTER_PORT, which works before any collective does, and when none does.
"""

import contextlib
import os
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext import device
from megatron_ext.device.device_protocol import Device
from megatron_ext.errors import ConfigurationError, PeerLostError
from megatron_ext.plugins.doctor.finding import Finding, ok, warning

_HEARTBEAT = 0.5  # seconds
_SILENT_AFTER = 4 * _HEARTBEAT


class Attendance:
    """The signatures of all ranks. `store` may be used by the groups that are made from it."""

    def __init__(self, rank: int, world_size: int, connect: "Connector", seconds: float):
        self.rank = rank
        self.world_size = world_size
        self.seconds = seconds
        self.store = connect()
        self._signatures = connect()  # its own connection: another thread's may be blocked in a read
        self._beats = connect()
        self._stop = threading.Event()
        self._signatures.set(f"host/{rank}", socket.gethostname())
        self._beats.add(f"beat/{rank}", 1)
        threading.Thread(target=self._beat, daemon=True).start()

    @classmethod
    def open(cls, environment: Mapping[str, str], seconds: float) -> "Attendance":
        """Sign in as the rank that the launcher made this process.

        Raises:
            ConfigurationError: there is no launcher.
            PeerLostError: rank 0's store does not answer.
        """
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]
        if missing:
            raise ConfigurationError(
                f"--collectives needs ranks, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; "
                "for example torchrun --nproc-per-node 2 -m megatron_ext doctor --collectives"
            )
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        try:
            return cls(rank, world_size, Connector(environment, seconds), seconds)
        except RuntimeError as error:  # torch's DistNetworkError and DistStoreError
            raise PeerLostError(
                f"rank {rank} on {socket.gethostname()}: the store of rank 0 at {environment['MASTER_ADDR']}:"
                f"{environment['MASTER_PORT']} does not answer within {seconds:g} s. Start rank 0, and see that its "
                "address is right and its port open between the machines."
            ) from error

    def enter(self, stage: str) -> None:
        """Sign before a stage."""
        self._signatures.set(f"in/{stage}/{self.rank}", "")

    def leave(self, stage: str) -> None:
        """Sign after a stage."""
        self._signatures.set(f"out/{stage}/{self.rank}", "")

    def absent(self, stage: str, kind: str = "in", seconds: float | None = None) -> list[int]:
        """Return the ranks that have not signed within so many seconds, by default all that there are for a stage."""
        deadline = time.monotonic() + (self.seconds if seconds is None else seconds)
        keys = [f"{kind}/{stage}/{rank}" for rank in range(self.world_size)]
        while not self._signatures.check(keys):
            if time.monotonic() > deadline:
                return [rank for rank, key in enumerate(keys) if not self._signatures.check([key])]
            time.sleep(0.05)
        return []

    def is_inside(self, stage: str, ranks: Sequence[int]) -> bool:
        """Return whether one of these ranks has signed before a stage and not after it."""
        signed = self._signatures.check
        return any(signed([f"in/{stage}/{rank}"]) and not signed([f"out/{stage}/{rank}"]) for rank in ranks)

    def silent(self) -> list[int]:
        """Return the ranks that came and are dead or stopped now: their heart does not beat. This takes two seconds."""
        before = self._heartbeats()
        time.sleep(_SILENT_AFTER)
        now = self._heartbeats()
        return [
            rank
            for rank in range(self.world_size)
            if before[rank] == now[rank] > 0 and not self._signatures.check([f"gone/{rank}"])
        ]

    def names(self, ranks: Sequence[int]) -> str:
        """Return `rank 3 (node7)`, with the host of those that came."""
        named = []
        for rank in ranks:
            known = self._signatures.check([f"host/{rank}"])
            host = f" ({self._signatures.get(f'host/{rank}').decode()})" if known else ""
            named.append(f"rank {rank}{host}")
        return ", ".join(named)

    def hosts(self) -> list[str]:
        """Return the host name of every rank; all ranks must have signed in to the store."""
        return [self._signatures.get(f"host/{rank}").decode() for rank in range(self.world_size)]

    def is_first_to_report(self) -> bool:
        """Return whether this rank is the one that says what went wrong: the first that asks."""
        return self._signatures.add("reports", 1) == 1

    def close(self) -> None:
        """Sign off, so that nobody takes this rank for dead."""
        self._stop.set()
        with contextlib.suppress(RuntimeError):  # the store went with rank 0
            self._signatures.set(f"gone/{self.rank}", "")

    def _beat(self) -> None:
        while not self._stop.wait(_HEARTBEAT):
            try:
                self._beats.add(f"beat/{self.rank}", 1)
            except RuntimeError:
                return  # rank 0 is gone, and its store with it

    def _heartbeats(self) -> list[int]:
        return [self._signatures.add(f"beat/{rank}", 0) for rank in range(self.world_size)]


class Connector:
    """Opens connections to the store; the first one of rank 0 is the store, unless torchrun's agent holds it."""

    def __init__(self, environment: Mapping[str, str], seconds: float):
        self._address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        self._is_master = environment["RANK"] == "0" and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._prefix = f"doctor/{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._timeout = timedelta(seconds=seconds)

    def __call__(self) -> Store:
        host, port = self._address
        master, self._is_master = self._is_master, False
        store = TCPStore(host, port, is_master=master, wait_for_workers=False, timeout=self._timeout)
        return PrefixStore(self._prefix, store)


_REPEATS = 3
_STAGES = ("process group", "all-reduce", "ring", "barrier", "bandwidth")


class NotTheReporter(PeerLostError):
    """Raised where the check failed and another rank says why."""


def check_collectives(kind: str, seconds: float, megabytes: float) -> list[Finding]:
    """Exercise the ranks that a launcher started; this process is one of them.

    Args:
        kind: the device, "auto", "cuda" or "cpu".
        seconds: time that each stage may take.
        megabytes: size of the messages whose speed is measured.
    Returns:
        What was found, on rank 0; nothing on the others.
    Raises:
        ConfigurationError: there is no launcher, or no GPU for this rank.
        PeerLostError: ranks did not come, did not answer, or cannot be reached; it names them.
    """
    attendance = Attendance.open(os.environ, seconds)
    try:
        attendance.enter("start")
        missing = attendance.absent("start")
        if missing:
            raise _failure(attendance, "start", f"{attendance.names(missing)} did not come", None)
        exercise = _Exercise(attendance, device.install(kind, engine=False), int(megabytes * 1e6))
        exercise.watch()
        return exercise.findings
    except RuntimeError as error:  # of the store: what the stages raise is kept, and judged
        raise PeerLostError(
            f"rank {attendance.rank}: the store of rank 0 no longer answers; look at rank 0's output, and its machine"
        ) from error
    finally:
        attendance.close()


class _Exercise:
    def __init__(self, attendance: Attendance, here: Device, size: int):
        self.findings: list[Finding] = []
        self._attendance = attendance
        self._device = here
        self._size = max(size, 4)
        self._stage = "process group"
        self._stage_began = time.monotonic()
        self._error: BaseException | None = None

    def watch(self) -> None:
        """Run all stages; a stage that fails, or takes too long, raises PeerLostError."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.1)
            if time.monotonic() - self._stage_began > self._attendance.seconds:
                break
        else:
            if self._error is None:
                return
        raise self._diagnosis()

    def _run(self) -> None:
        try:
            self._device.bind_thread()
            for stage, work in zip(
                _STAGES, (self._start, self._all_reduce, self._ring, dist.barrier, self._bandwidth), strict=True
            ):
                self._stage, self._stage_began = stage, time.monotonic()
                self._attendance.enter(stage)
                work()
                self._device.synchronize()
                self._attendance.leave(stage)
            dist.destroy_process_group()
        except BaseException as error:
            self._error = error

    def _start(self) -> None:
        dist.init_process_group(
            self._device.backend,
            store=self._attendance.store,
            rank=self._attendance.rank,
            world_size=self._attendance.world_size,
            timeout=timedelta(seconds=4 * self._attendance.seconds),  # after this check's own
            device_id=self._device.torch_device if self._device.kind == "cuda" else None,
        )

    def _all_reduce(self) -> None:
        ranks = self._attendance.world_size
        total = self._filled(self._attendance.rank + 1, 1)
        dist.all_reduce(total)
        if total.item() != ranks * (ranks + 1) / 2:
            raise RuntimeError(f"the all-reduce gave {total.item()} instead of {ranks * (ranks + 1) / 2}")

    def _ring(self) -> None:
        got = self._pass_on(1)
        if got.item() != self._previous:
            raise RuntimeError(f"the ring brought {got.item()} instead of {self._previous}")

    def _bandwidth(self) -> None:
        ranks, count = self._attendance.world_size, self._size // 4
        if ranks == 1:
            return
        tensor = self._filled(0, count)
        reduced = self._seconds(lambda: dist.all_reduce(tensor))
        own = self._seconds(lambda: self._pass_on(count))
        links: list[float] = [0.0] * ranks
        dist.all_gather_object(links, 4 * count / own / 1e9)
        if self._attendance.rank == 0:
            self.findings += _report(self._attendance.hosts(), self._device.backend, links)
            bus = 2 * (ranks - 1) / ranks * 4 * count / reduced / 1e9
            self.findings.append(
                ok(f"all-reduce of {4 * count / 1e6:g} MB: {bus:.2f} GB/s a rank, 2(d-1)/d x bytes / time")
            )

    def _pass_on(self, count: int) -> torch.Tensor:
        """Send own values to the next rank; return the values that the previous rank sent."""
        sent, got = self._filled(self._attendance.rank, count), self._filled(-1, count)
        after = (self._attendance.rank + 1) % self._attendance.world_size
        if after == self._attendance.rank:
            return sent
        operations = [dist.P2POp(dist.isend, sent, after), dist.P2POp(dist.irecv, got, self._previous)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return got

    def _seconds(self, work) -> float:
        """Return the shortest of a few times."""
        times = []
        for _ in range(_REPEATS):
            dist.barrier()
            self._device.synchronize()
            began = time.perf_counter()
            work()
            self._device.synchronize()
            times.append(time.perf_counter() - began)
        return min(times)

    def _filled(self, value: float, count: int) -> torch.Tensor:
        return torch.full((count,), float(value), device=self._device.torch_device)

    @property
    def _previous(self) -> int:
        return (self._attendance.rank - 1) % self._attendance.world_size

    def _diagnosis(self) -> PeerLostError:
        """Return who is to blame for the stage that did not end."""
        attendance, stage, error = self._attendance, self._stage, self._error
        left = max(attendance.seconds - (time.monotonic() - self._stage_began), 0.0)
        missing = attendance.absent(stage, seconds=left)
        silent = attendance.silent()
        if silent:
            # Where they stopped, not where this rank waits: a rank that does not wait for them may be a stage further.
            stage = next((each for each in _STAGES if attendance.is_inside(each, silent)), stage)
            what = f"{attendance.names(silent)} came and no longer answers"
        elif missing:
            what = f"{attendance.names(missing)} did not get so far"
        else:
            waiting = attendance.absent(stage, "out", seconds=0.0)
            what = f"all ranks are there, but {attendance.names(waiting)} cannot exchange data"
        return _failure(attendance, stage, what, error)


def _failure(attendance: Attendance, stage: str, what: str, error: BaseException | None) -> PeerLostError:
    if not attendance.is_first_to_report():
        return NotTheReporter(what)
    said = f" ({' '.join(str(error).split())[:300]})" if error is not None else ""
    return PeerLostError(
        f"{stage}: {what}, within {attendance.seconds:g} s{said}. Look at the output and the kernel's log of those "
        "ranks, and at the network between the machines: megatron-ext doctor without --collectives, on each of them."
    )


def _report(hosts: list[str], backend: str, links: list[float]) -> list[Finding]:
    """Return findings on the ring: who took part, and whether a link is much slower than the rest. `links` is in GB/s,
    by receiver."""
    machines = ", ".join(f"{n} on {host}" for host, n in Counter(hosts).items())
    findings = [ok(f"{len(hosts)} ranks over {backend} ({machines}): all-reduce, ring and barrier are right")]
    slowest, median = min(range(len(links)), key=links.__getitem__), statistics.median(links)
    text = f"ring: {median:.2f} GB/s a link in the middle, slowest {links[slowest]:.2f}"
    sender = (slowest - 1) % len(links)
    text += f" from rank {sender} ({hosts[sender]}) to rank {slowest} ({hosts[slowest]})"
    if len(set(hosts)) == 1 and links[slowest] < median / 2:
        findings.append(
            warning(
                text, "collectives go at the pace of the slowest link", "compare `nvidia-smi topo -m` and dmesg there"
            )
        )
    else:
        findings.append(ok(text))
    return findings
