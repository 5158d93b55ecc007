"""How pretrain_gpt.py ends with many command lines: `python command_line_exits.py < LINES`, a JSON list of lists.

For each, the program is forked before it reads a flag. What the first line makes it import of our package is imported
by then, which takes longer than all else that is asked of it; torch is not among that.
Prints a JSON list of [exit code, seconds of computing, what it said on the standard error output].
"""

import gc
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pretrain_gpt import start


def end_of(arguments: list[str], begin: Callable[[], object] = lambda: None) -> tuple[int, float, str]:
    """begin: what the process that is forked does first."""
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            os.dup2(said.fileno(), 2)
            begin()
            try:
                start(arguments)
            except SystemExit as ended:
                os._exit(ended.code if isinstance(ended.code, int) else 1)
            except BaseException:  # what an interpreter would end with
                sys.excepthook(*sys.exc_info())  # pyright: ignore[reportArgumentType]
                os._exit(1)
            os._exit(0)
        _, status, used = os.wait4(pid, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime, said.read().decode()


def imported_for(arguments: list[str]) -> list[str]:
    """The modules that are there when the program ends, in their order."""
    with tempfile.TemporaryFile("w+") as names:
        end = os._exit

        def tell(code: int) -> None:
            print(*sys.modules, file=names, flush=True)
            end(code)

        end_of(arguments, lambda: setattr(os, "_exit", tell))
        names.seek(0)
        return names.read().split()


def ends_of(lines: list[list[str]]) -> list[tuple[int, float, str]]:
    names = imported_for(lines[0])
    assert not {"torch", "megatron.core"} & set(names)
    for name in names:
        if name.startswith("megatron_ext."):
            importlib.import_module(name)
    gc.freeze()
    return [end_of(arguments) for arguments in lines]


if __name__ == "__main__":
    print(json.dumps(ends_of(json.load(sys.stdin))))
