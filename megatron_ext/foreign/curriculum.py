"""Turns DeepSpeed's curriculum of sequence lengths into the lines of a file for --stages.

    nearest_stages({"schedule_type": "fixed_discrete", "schedule_config.difficulty": [64, 128], ...})
    # {0: {seq_length: 64}, 100: {seq_length: 128}}

Step n has the length get_difficulty(n) of deepspeed's runtime/data_pipeline/curriculum_scheduler.py, from n = 1.
"""

import bisect
import math
from collections.abc import Mapping
from typing import Any

_MOST = 16
"""Stages: each costs a checkpoint and the construction of the run, and lengths grow by 8 there."""


def nearest_stages(section: Mapping[str, Any]) -> str | None:
    """Return the content of the file, in one line of YAML; None where the section gives no lengths.

    Args:
        section: the values of `curriculum_learning`, by their dotted keys below it.
    """
    try:
        find = {"fixed_discrete": _discrete, "fixed_linear": _root, "fixed_root": _root}[section["schedule_type"]]
        stages = find({key.removeprefix("schedule_config."): value for key, value in section.items()})
    except (ArithmeticError, KeyError, TypeError, ValueError):
        return None
    return f"{{{', '.join(f'{first}: {{seq_length: {length}}}' for first, length in stages.items())}}}"


def _discrete(section: Mapping[str, Any]) -> dict[int, int]:
    return dict(zip([0, *map(int, section["max_step"])], map(int, section["difficulty"]), strict=True))


def _root(section: Mapping[str, Any]) -> dict[int, int]:
    low, high, total, by = (
        int(section[key]) for key in ("min_difficulty", "max_difficulty", "total_curriculum_step", "difficulty_step")
    )
    degree = int(section["root_degree"] if section["schedule_type"] == "fixed_root" else 1)
    start = -(-low // by) * by

    def length(step: int) -> int:
        grown = math.floor((step / total) ** (1 / degree) * (high - low) + low)
        return min(max(grown - grown % by, start), high)

    lengths = range(start, high, by)
    shown = lengths[:: max(1, math.ceil(len(lengths) / (_MOST - 1)))]
    steps = range(1, 1 + total * (1 + by) ** degree)  # beyond `total` where the longest is no multiple of the step
    return {bisect.bisect_left(steps, one, key=length): one for one in (*shown, high)}
