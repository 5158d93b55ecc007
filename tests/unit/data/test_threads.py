"""Threads take requests in order; at the end what has not begun is dropped."""

import sys
import threading

import pytest

from megatron_ext.data.threads import DaemonThreads
from tests.support.counted_samples import assert_ended


def test_threads_take_requests_in_order_and_not_those_taken_back() -> None:
    """An error of any kind comes to who asked; at the end what has not begun is dropped, and all threads end."""
    gate, done = threading.Event(), []
    threads = DaemonThreads(1, "worker")
    [worker] = threads._threads
    assert (worker.name, worker.daemon) == ("worker-0", True)
    first = threads.submit(lambda: gate.wait(20))
    second, third, broken, last = (threads.submit(one) for one in (
        lambda: done.append("second"), lambda: done.append("third"), lambda: sys.exit(3), lambda: done.append("last")
    ))  # fmt: skip
    assert second.cancel()
    gate.set()
    assert first.result(20)
    with pytest.raises(SystemExit):
        broken.result(20)
    last.result(20)
    assert third.done()
    assert done == ["third", "last"]
    threads.close()
    several = DaemonThreads(3, "several")
    several.close()
    assert_ended({worker, *several._threads})
