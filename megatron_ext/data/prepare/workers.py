"""Several processes encode blocks, in order.

All processes together must fit in memory: few blocks are in flight, long documents stay here, and the workers are
forked where that is safe, so that they share the tokenizer's tables and start at once.
"""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor

from megatron_ext.data.prepare.documents import Block
from megatron_ext.data.prepare.encode import EncodedBlock, MakeBlock

_IN_FLIGHT_BYTES = 1 << 25
_LONG_BLOCK = 1 << 23


def encode_in_processes(
    workers: int,
    encoder: MakeBlock,
    start: Callable[[], MakeBlock],
    locked: Sequence[int],
    blocks: Iterable[Block],
) -> Iterator[EncodedBlock]:
    """Encode in `workers` processes; results come in the order of the blocks, at most 3 a worker in flight.

    Args:
        workers: number of processes.
        encoder: the encoder of this process. It also takes blocks of over 8 MB, which are one long document: on its way
            to a worker there would be four copies of it.
        start: makes the encoder of a worker that is not forked; can be pickled.
        locked: file descriptors that a forked worker must not keep open, because they hold a lock.
        blocks: the input.
    """
    # A forked child inherits the locks of other threads as they stand.
    if threading.active_count() == 1:
        fork = multiprocessing.get_context("fork")
        pool = ProcessPoolExecutor(workers, fork, initializer=_adopt, initargs=(encoder, tuple(locked)))
    else:
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(workers, spawn, initializer=_begin, initargs=(start,))
    try:
        waiting: deque[tuple[int, Future[EncodedBlock]]] = deque()
        for block in blocks:
            if block.size > _LONG_BLOCK:
                while waiting:
                    yield waiting.popleft()[1].result()
                yield encoder(block)
                continue
            waiting.append((block.size, pool.submit(_encode, block)))
            while len(waiting) >= 3 * workers or sum(size for size, _ in waiting) > _IN_FLIGHT_BYTES:
                yield waiting.popleft()[1].result()
        while waiting:
            yield waiting.popleft()[1].result()
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: MakeBlock | None = None


def _adopt(encoder: MakeBlock, locked: Sequence[int]) -> None:
    """Begin a forked worker."""
    for descriptor in locked:
        os.close(descriptor)
    _begin(lambda: encoder)


def _begin(start: Callable[[], MakeBlock]) -> None:
    global _encoder
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = start()


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next block for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode(block: Block) -> EncodedBlock:
    assert _encoder is not None
    return _encoder(block)
