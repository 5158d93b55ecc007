"""How pretrain_gpt.py ends with each of many command lines: `python ends_of_lines.py < LINES`, a JSON list of lists.

For each, the program is forked before it reads a flag, with nothing imported that it has not imported by then itself.
Prints a JSON list of [exit code, seconds of computing, what it said on the standard error output].
"""

import json
import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pretrain_gpt import start


def end_of(arguments: list[str]) -> tuple[int, float, str]:
    with tempfile.TemporaryFile() as said:
        pid = os.fork()
        if pid == 0:
            os.dup2(said.fileno(), 2)
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


if __name__ == "__main__":
    print(json.dumps([end_of(arguments) for arguments in json.load(sys.stdin)]))
