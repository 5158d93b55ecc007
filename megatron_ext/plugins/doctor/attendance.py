"""Has ranks sign in a store at every stage of a check, so that the ranks that did not can be named.

    attendance = Attendance.open(environment, seconds=20)
    attendance.enter("all-reduce")
    ...
    attendance.leave("all-reduce")

The store is torch's own, at MASTER_ADDR:MASTER_PORT, which works before any collective does, and when none does.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from megatron_ext.errors import ConfigurationError, PeerLostError

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
