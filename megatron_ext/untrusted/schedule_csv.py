"""Reads a pipeline's schedule from a CSV file as `torch.distributed.pipelining` writes it: a line for each rank, and on
it what the rank does, in order.

    0F0,0F1,,0I0,0W0,0F2,(0F3;0B1)OVERLAP_F_B,...

An entry is stage, kind and microbatch (`pipeline_tables.py`). A pair in parentheses is one after the other here. Sends,
receives and what torch does for its FSDP are left out: they follow from the passes.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.pipeline_tables import Action, Rows
from megatron_ext.untrusted.text import TextError, read_file

_MOST_BYTES = 1 << 24
_MOST_STAGES = 1 << 16
_PASS = re.compile(r"(\d{1,7})([FBIW])(\d{1,7})")
_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_OTHER = re.compile(r"\d{1,7}((WAIT_)?(SEND|RECV)_[FB]|(UN|RE)SHARD|(WAIT_)?REDUCE_GRAD)\d{0,7}")


@functools.lru_cache(maxsize=8)
def read_schedule(path: str) -> Rows:
    """Return the table of a file.

    Raises:
        TextError: an entry is none of these; the text names its line.
        OSError: the file cannot be read.
    """
    try:
        lines = read_file(Path(path), _MOST_BYTES).decode("utf-8-sig").splitlines()
    except UnicodeError as error:
        raise TextError(f"it is no text: {error}") from None
    return tuple(tuple(_actions(number, line)) for number, line in enumerate(lines, 1) if line.strip())


def _actions(number: int, line: str) -> Iterator[Action]:
    for place, entry in enumerate(line.split(","), 1):
        pair = _PAIR.fullmatch(entry.strip())
        for part in pair[1].split(";") if pair else [entry]:
            text = part.strip().strip('"')
            found = _PASS.fullmatch(text)
            if found is not None and int(found[1]) < _MOST_STAGES:
                yield Action(int(found[1]), found[2], int(found[3]))
            elif text and not _OTHER.fullmatch(text):
                raise TextError(f"line {number}, entry {place}: {text[:40]!r} is no pass, such as 2F0, 2B0, 2I0 or 2W0")
