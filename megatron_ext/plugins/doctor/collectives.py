"""tools/doctor.py --collectives checks whether all ranks reach each other, which do not, and how fast.

There are these stages, each with a time limit: every rank comes; a process group; an all-reduce; a message around the
ring of ranks; a barrier; the speed of an all-reduce and of every link of the ring. The work is done on a thread of its
own, so that this one can say who is missing while a backend still waits.
"""

import os
import statistics
import threading
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_ext import device
from megatron_ext.device.device_protocol import Device
from megatron_ext.errors import PeerLostError
from megatron_ext.plugins.doctor.attendance import Attendance
from megatron_ext.plugins.doctor.finding import Finding, ok, warning

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
