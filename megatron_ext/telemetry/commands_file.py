"""Keeps the command of each start of a run in `commands.jsonl` in --save, one JSON object a start, oldest first.

    {"time": "2026-11-29T17:30:14+00:00", "ranks": 8, "command": "megatron-ext pretrain --config run.yaml --save out"}

`command` is a line for a shell, without the launcher of the ranks.
"""

import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from megatron_ext.durable import only_files
from megatron_ext.untrusted.text import TextError, load_json, read_file
from megatron_ext.untrusted.values import fields, integer, text

NAME = "commands.jsonl"
_MOST_BYTES = 1 << 24
_ROW = fields({"time": text(100), "ranks": integer(), "command": text(1 << 20)})


@dataclass(frozen=True)
class Start:
    """One start of a run."""

    time: str
    """UTC, ISO 8601."""
    ranks: int
    command: str


def record_start(save: str | Path, words: Sequence[str], ranks: int) -> None:
    """Append this start of a run; a folder that cannot be written is left to the first save, which reports it.

    Args:
        save: the run's folder, which exists.
        words: the flags, as the user gave them.
        ranks: number of ranks that were started.
    """
    row = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "ranks": ranks,
        "command": shlex.join([*_program(words), *words]),
    }
    with contextlib.suppress(OSError), open(Path(save) / NAME, "a", encoding="utf-8", opener=only_files) as file:
        file.write(json.dumps(row) + "\n")


def starts(save: Path) -> list[Start]:
    """Return the recorded starts of the run in the folder, oldest first, without lines that cannot be read."""
    found = []
    with contextlib.suppress(TextError, OSError):
        for line in read_file(save / NAME, _MOST_BYTES).splitlines():
            with contextlib.suppress(TextError):
                row = load_json(line)
                _ROW(row)
                found.append(Start(**row))
    return found


def _program(words: Sequence[str]) -> list[str]:
    """Return the words before the flags: the user's script where one is run, else `megatron-ext pretrain`."""
    before = sys.argv[: len(sys.argv) - len(words)]
    script = before[0] if [*before, *words] == sys.argv and len(before) == 1 else ""
    return ["python", script] if script.endswith(".py") else ["megatron-ext", "pretrain"]
