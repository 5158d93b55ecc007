"""Reads the value of `--data-path` and the like: prefixes, or weights and prefixes in turn."""

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.parse.options import flag_of

LIST_NAMES = ("data_args_path", "per_split_data_args_path")
DATA_PATH_NAMES = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


@dataclass(frozen=True)
class Blend:
    """The prefixes of .bin/.idx files, and their weights, or None where each is read in proportion to its size."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None


def read_blend(items: Sequence[str]) -> Blend:
    """Return the blend that a list of words names, read as Megatron reads it.

    `w1 p1 w2 p2` has weights; a list of odd length, or one whose every other item is no number, is prefixes alone.

    Raises:
        ValueError: some but not all weights are numbers, or a weight is not positive and finite.
    """
    if len(items) % 2 == 1:
        return Blend(tuple(items))
    weights = [_number(item) for item in items[::2]]
    numbers = [weight for weight in weights if weight is not None]
    if not numbers:
        return Blend(tuple(items))
    if len(numbers) < len(weights):
        wrong = items[::2][weights.index(None)]
        raise ValueError(f"{wrong!r} stands where a weight should be; write: weight prefix weight prefix ...")
    if not all(weight > 0 and math.isfinite(weight) for weight in numbers):
        raise ValueError(f"weights must be positive, not {' '.join(items[::2])}")
    return Blend(tuple(items[1::2]), tuple(numbers))


def is_url(path: str) -> bool:
    """Return whether a path is a URL of fsspec (s3://bucket/name), and not one of a file on this machine."""
    return re.match(r"[a-z][a-z0-9+.\-]+://", path) is not None


def missing_paths(typed: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files that the typed values name and that do not exist, each after its flag: `--data-path x.idx`."""
    return tuple(f"{flag} {path}" for flag, path in _needed_paths(typed) if not os.path.exists(path))


def _needed_paths(typed: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    for name in DATA_PATH_NAMES:
        try:
            blend = read_blend(typed.get(name) or ())
        except ValueError:
            continue  # validate says what is wrong with the blend itself
        for prefix in blend.prefixes:
            if is_url(prefix):
                continue  # a store is asked when the data is opened
            for suffix in (".bin", ".idx"):
                yield flag_of(name), prefix + suffix
    for name in (*LIST_NAMES, "eval_tasks", "sample_prompts", "stages"):
        if typed.get(name) is not None:
            yield flag_of(name), typed[name]


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
