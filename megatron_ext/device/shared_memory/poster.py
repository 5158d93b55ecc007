"""Writes later what found no free slot, so that issuing an operation never waits."""

import threading
import time
from collections import deque
from collections.abc import Callable

_PAUSE = 0.0005  # seconds


class Poster:
    """Posts in order. What cannot be written at once goes to a thread, which ends when nothing is left.

    Args:
        lock: held whenever something is posted.
    """

    def __init__(self, lock: threading.RLock):
        self._lock = lock
        self._waiting: deque[Callable[[], bool]] = deque()

    def post(self, write: Callable[[], bool]) -> None:
        """Write now if that is possible and nothing waits, else as soon as possible. Call it with the lock held.

        Args:
            write: returns whether it could write.
        """
        if self._waiting or not write():
            self._waiting.append(write)
            if len(self._waiting) == 1:
                threading.Thread(target=self._run, name="shared memory", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                while self._waiting and self._waiting[0]():
                    self._waiting.popleft()
                if not self._waiting:
                    return
            time.sleep(_PAUSE)
