"""A process with torch as it comes, in which nothing of ours is installed: for what transformers computes by itself.

Every worker of pytest keeps one, for importing torch and transformers takes longer than what the tests ask of them.
"""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any


def in_plain_process(function: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> Any:
    """Return what a function returns in that process. It is importable by name, and leaves torch as it found it."""
    return _process().submit(function, *arguments).result(timeout=timeout)


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)


def _begin() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
