"""A process with torch as it comes, in which nothing of ours is installed: for what transformers computes by itself,
and to fork programs that have torch loaded.

Every worker of pytest keeps one, for importing torch and transformers takes longer than what the tests ask of them.
"""

import functools
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.warm_python import run_words


def in_plain_process(function: Callable[..., Any], *arguments: Any, timeout: float = 300.0) -> Any:
    """Return what a function returns in that process. It is importable by name, and leaves torch as it found it."""
    return _process().submit(_told, function, *arguments).result(timeout=timeout)


def _told(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call it; what it raises is told as text, for an exception that pickle cannot restore would end the process."""
    try:
        return function(*arguments)
    except Exception:
        raise RuntimeError(traceback.format_exc()) from None


class Ended(NamedTuple):
    """How a process ended, and what it wrote to its standard output and error."""

    code: int
    output: str


def plain_python(words: Sequence[str], folder: Path, **variables: str) -> Ended:
    """Do as `python *words` in a folder, with further variables of the environment, in a fork of that process.

    torch and its compiler are imported already, and nothing of the engine.
    """
    return in_plain_process(_forked, list(words), str(folder), {**os.environ, **variables})


def _forked(words: list[str], folder: str, environment: dict[str, str]) -> Ended:
    importlib.import_module("torch._dynamo")
    assert "megatron.core" not in sys.modules, "a function that was called here has imported it"
    with tempfile.TemporaryFile("w+") as output:
        process = os.fork()
        if process == 0:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            try:
                run_words(words, folder, environment)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                traceback.print_exc()
                code = 1
            else:
                code = 0
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        output.seek(0)
        return Ended(code, output.read())


@functools.cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"), initializer=_begin)


def _begin() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TRITON_INTERPRET"] = "1"  # torch's compiler imports Triton, which looks at this once
    import torch

    from megatron_ext.plugins.huggingface.transformers_reference import use_plain_torch

    use_plain_torch()
    torch.set_num_threads(1)
