"""The board of an attempt: ranks publish heartbeats and reports for each other under keys of the store by which they
met.

Under torchrun the store is its own process's and outlives every rank. Without torchrun it is rank 0's: then a store
that is silent means that rank 0 is. Files in --save would outlive both, but file systems that machines share show a
change seconds later, and a run without --save has none.
"""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

_CALL, _VERDICT, _END, _SPEAKER = "watch/call", "watch/verdict", "watch/end", "watch/speaker"
_NEWS = "watch/news"  # there before a call or an end is: who looks twice a second asks for one key


class Board:
    """Reads and writes the heartbeats and reports of ranks. A store that is gone raises RuntimeError; one that is
    stopped never answers, which `asking_since` shows to another thread.

    Args:
        store: a connection of its own, since another thread's may be blocked in a read.
    """

    def __init__(self, store: "Store", rank: int, world_size: int):
        self.rank, self.world_size = rank, world_size
        self.asking_since: float | None = None
        self._store = store

    def publish(self, beat: dict[str, Any]) -> None:
        """Publish the heartbeat of this rank."""
        with self._asking():
            self._store.set(_beat_key(self.rank), json.dumps(beat))

    def beats(self, ranks: Iterable[int] | None = None) -> dict[int, dict[str, Any]]:
        """Return the last heartbeat of these ranks, by default of all; ranks without a heartbeat are left out."""
        return self._read({rank: _beat_key(rank) for rank in (range(self.world_size) if ranks is None else ranks)})

    def has_news(self) -> bool:
        """Return whether a rank has called, has been seen to end, or is about to report one of these."""
        return self._has([_NEWS])

    def call(self, step: int) -> tuple[int, int]:
        """Call all ranks because of a hang in `step`; return rank and step of the first call."""
        with self._asking():
            self._store.set(_NEWS, "")
            first = self._store.compare_set(_CALL, "", f"{self.rank} {step}").decode()
        return _caller(first)

    def caller(self) -> tuple[int, int] | None:
        """Return the rank that called all ranks because of a hang, and the step; None without a call."""
        text = self._get(_CALL)
        return None if text is None else _caller(text)

    def answer(self, report: dict[str, Any]) -> None:
        """Answer a call with this rank's report."""
        with self._asking():
            self._store.set(_answer_key(self.rank), json.dumps(report))

    def answers(self, seconds: float) -> dict[int, dict[str, Any]]:
        """Return the reports that ranks answered with, waiting for all ranks for so many seconds at most."""
        deadline = time.monotonic() + seconds
        keys = {rank: _answer_key(rank) for rank in range(self.world_size)}
        while not self._has(list(keys.values())) and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._read(keys)

    def judge(self, verdict: dict[str, Any]) -> None:
        """Publish the verdict: the cause has been printed."""
        with self._asking():
            self._store.set(_VERDICT, json.dumps(verdict))

    def verdict(self, seconds: float) -> dict[str, Any] | None:
        """Return the verdict that the caller told the others, waiting for so many seconds at most; None without one."""
        deadline = time.monotonic() + seconds
        while (text := self._get(_VERDICT)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return None if text is None else json.loads(text)

    def note_end(self, text: str) -> None:
        """Note how a rank ended, unless one ended before it: the first is the cause of the others."""
        with self._asking():
            self._store.set(_NEWS, "")
            self._store.compare_set(_END, "", text)

    def first_end(self) -> str | None:
        """Return how the first rank to end ended; None while all live."""
        return self._get(_END)

    def speaks_for_all(self) -> bool:
        """Return whether this rank is the first to ask; the first reports why all ranks end."""
        with self._asking():
            return self._store.add(_SPEAKER, 1) == 1

    def _get(self, key: str) -> str | None:
        if not self._has([key]):
            return None
        with self._asking():
            return self._store.get(key).decode()

    def _read(self, keys: dict[int, str]) -> dict[int, dict[str, Any]]:
        if not self._has(list(keys.values())):
            keys = {rank: key for rank, key in keys.items() if self._has([key])}
        if not keys:
            return {}
        with self._asking():
            texts = self._store.multi_get(list(keys.values()))
        return {rank: json.loads(value) for rank, value in zip(keys, texts, strict=True)}

    def _has(self, keys: list[str]) -> bool:
        with self._asking():
            return self._store.check(keys)

    @contextmanager
    def _asking(self) -> Iterator[None]:
        self.asking_since = time.monotonic()
        try:
            yield
        finally:
            self.asking_since = None


def _beat_key(rank: int) -> str:
    return f"watch/beat/{rank}"


def _answer_key(rank: int) -> str:
    return f"watch/answer/{rank}"


def _caller(text: str) -> tuple[int, int]:
    rank, step = text.split()
    return int(rank), int(step)
