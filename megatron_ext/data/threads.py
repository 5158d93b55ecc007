"""A few daemon threads that run functions in the order they were submitted.

concurrent.futures' own pool makes the interpreter wait for its threads at exit, so a read that hangs would keep
a finished or failed program alive.
"""

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class DaemonThreads:
    """The threads, and the queue that they take functions from.

    Args:
        count: number of threads.
        name: prefix of the threads' names, before their number.
    """

    def __init__(self, count: int, name: str):
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run, args=(self._queue,), name=f"{name}-{i}", daemon=True) for i in range(count)
        ]
        for thread in self._threads:
            thread.start()
        # Also called at exit: the threads must be outside torch before its libraries are torn down.
        self.close = weakref.finalize(self, _stop, self._queue, self._threads)

    def submit[T](self, function: Callable[[], T]) -> Future[T]:
        """Queue `function` for one of the threads and return its future."""
        future: Future[T] = Future()
        self._queue.put((future, function))
        return future


def _run(tasks: queue.SimpleQueue) -> None:
    while (task := tasks.get()) is not None:
        future, function = task
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        del task, future, function  # a thread that waits must not keep the last result, nor its owner, alive


def _stop(tasks: queue.SimpleQueue, threads: list[threading.Thread]) -> None:
    while not tasks.empty():
        with contextlib.suppress(queue.Empty):
            tasks.get_nowait()
    for _ in threads:
        tasks.put(None)
    deadline = time.monotonic() + 1.0
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
