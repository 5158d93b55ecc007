"""Reads the data of BigScience's scripts, `--train-weighted-split-paths "NAME: WEIGHT BEGIN:END PREFIX, ..."`, and the
files that hold such words, `--train-weighted-split-paths-path FILE`."""

import re
import shlex
from collections.abc import Sequence

from megatron_ext.foreign.script import Script
from megatron_ext.untrusted.text import read_file

_MOST_BYTES = 2**24
_GROUP = re.compile(r"\s*([^\s:,]+)\s*:\s+(.+)", re.DOTALL)
_WHOLE = re.compile(r"0*(\.0*)?:1(\.0*)?")


def read_weighted_splits(script: Script) -> None:
    """Give --train-data-path and its like for the data that a script names in BigScience's way."""
    for part in ("train", "valid", "test"):
        flag = f"--{part}-weighted-split-paths"
        path, groups = script.take(f"{flag}-path"), script.take(flag)
        try:
            if path is not None:
                flag = f"{flag}-path"
                groups = shlex.split(read_file(" ".join(path), _MOST_BYTES).decode())
            if groups is not None:
                script.give(*_flags(part, groups))
        except (OSError, ValueError) as error:
            file = f" {' '.join(path)}" if path else ""
            script.problems.append(f"{flag}{file}: {getattr(error, 'strerror', None) or error}")
            script.unread |= {"data_path", "train_data_path"}


def _flags(part: str, groups: Sequence[str]) -> list[list[str]]:
    sources = dict(_source(group) for group in groups)
    if len(sources) == 1:
        return [[f"--{part}-data-path", *next(iter(sources.values()))]]
    if part != "valid" or any(len(words) > 2 for words in sources.values()):
        raise ValueError(f"{len(groups)} groups of data; give one, or for validation several of one prefix each")
    prefixes = [prefix for _, prefix in sources.values()]
    return [["--valid-data-path", *prefixes], ["--multiple-validation-sets"], ["--validation-set-names", *sources]]


def _source(group: str) -> tuple[str, list[str]]:
    """Return the name of a group, and its weights and prefixes in turn."""
    found = _GROUP.fullmatch(group)
    items = [item.split() for item in found[2].split(",")] if found else []
    if found is None or any(len(item) != 3 for item in items):
        raise ValueError(f'{group[:100]!r} is not "NAME: WEIGHT BEGIN:END PREFIX, ..."; write it so')
    parts = [f"{share} of {prefix}" for _, share, prefix in items if not _WHOLE.fullmatch(share)]
    if parts:
        raise ValueError(f"{parts[0]} is not the whole, 0:1; use --data-path with --split, which divides every prefix")
    return found[1], [word for weight, _, prefix in items for word in (weight, prefix)]
