"""Reads the data of BigScience's scripts: `--train-weighted-split-paths "NAME: WEIGHT BEGIN:END PREFIX, ..."`."""

import re
import shlex
from collections.abc import Sequence

from megatron_ext.foreign.script import Script
from megatron_ext.untrusted.text import read_file

_GROUP = re.compile(r"\s*[^\s:,]+\s*:\s+(.+)", re.DOTALL)


def read_weighted_splits(script: Script) -> None:
    """Give --train-data-path and its like for the data that a script names in BigScience's way."""
    for part in ("train", "valid", "test"):
        flag = f"--{part}-weighted-split-paths"
        path, groups = script.take(f"{flag}-path"), script.take(flag)
        try:
            if path is not None:
                flag = f"{flag}-path"
                groups = shlex.split(read_file(" ".join(path), 2**24).decode())
            if groups is not None:
                script.give([f"--{part}-data-path", *_prefixes(groups)])
        except (OSError, ValueError) as error:
            if isinstance(error, FileNotFoundError) and "--dry-run" in script:
                named = " ".join(path or ())
                script.give(("--per-split-data-args-path", named))  # which a dry run does not open either
                script.warnings.append(f"{flag} {named} does not exist; a run needs it, --dry-run does not")
                continue
            script.problems.append(f"{' '.join([flag, *(path or ())])}: {getattr(error, 'strerror', None) or error}")
            script.unread |= {"data_path", "train_data_path"}


def _prefixes(groups: Sequence[str]) -> list[str]:
    """Return weights and prefixes in turn. Raises ValueError where the words are others, or mean what is not here."""
    found = _GROUP.fullmatch(groups[0]) if len(groups) == 1 else None
    items = [item.split() for item in found[1].split(",")] if found else []
    if not items or any(len(item) != 3 for item in items):
        raise ValueError(f'{len(groups)} words, but expected one, "NAME: WEIGHT BEGIN:END PREFIX, ..."; give one group')
    for _, share, prefix in items:
        if not re.fullmatch(r"0*(\.0*)?:1(\.0*)?", share):
            raise ValueError(f"{prefix} has {share}, not the whole, 0:1; use --data-path with --split, alike for each")
    return [word for weight, _, prefix in items for word in (weight, prefix)]
