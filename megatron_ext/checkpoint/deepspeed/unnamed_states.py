"""Finds the masters and Adam's states of 16-bit runs without ZeRO, whose optimizers keep vectors without names.

Such a vector has all parameters of a group one after another (`fp32_groups_flat` of deepspeed's
runtime/fp16/fused_optimizer.py), or one parameter (`fp32_groups` of unfused_optimizer.py). Its next parameter is the
first one of the model whose weights the masters are, once rounded to its 16 bits: one that no file had before, if any.
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from megatron_ext.checkpoint.copying import BLOCK
from megatron_ext.checkpoint.deepspeed.zero_shards import Pieces, part_of
from megatron_ext.checkpoint.huggingface.arrays import converted
from megatron_ext.checkpoint.huggingface.safetensors import Entry


def find_states(files: Iterable[Any], weights: Mapping[str, Any]) -> dict[str, dict[str, Pieces]]:
    """Return of each state (param, exp_avg, exp_avg_sq) what is found of a tensor-parallel rank, by DeepSpeed's names.

    Args:
        files: contents that its pipeline stages or expert-parallel ranks have saved.
        weights: its tensors, in the model's order.
    """
    found: dict[str, dict[str, Pieces]] = {"param": {}, "exp_avg": {}, "exp_avg_sq": {}}
    usable = {name: one for name, one in weights.items() if isinstance(one, Entry) and one.dtype in ("BF16", "F16")}
    for content in files:
        left = sorted(usable, key=found["param"].__contains__)
        with suppress(KeyError, IndexError, TypeError, AttributeError):  # another optimizer's
            saved = content["optimizer"]
            masters = saved.get("fp32_groups_flat") or [one for group in saved["fp32_groups"] for one in group]
            for number, master in enumerate(masters):
                vectors = {**saved["optimizer_state_dict"]["state"][number], "param": master}
                if len({(vectors[state].dtype, math.prod(vectors[state].shape)) for state in found}) == 1:
                    at = 0
                    while name := next((name for name in left if _rounds(master, at, usable[name])), None):
                        left.remove(name)
                        size = math.prod(usable[name].shape)
                        for state, of_state in found.items():
                            piece = part_of(vectors[state], at, size)
                            of_state[name] = Pieces(master.dtype, usable[name].shape, (piece,))
                        at += size
    return found


def _rounds(masters: Entry, start: int, weight: Entry) -> bool:
    """Return whether the masters from `start` on are these weights, once rounded."""
    size = math.prod(weight.shape)
    blocks = ((at, min(BLOCK, size - at)) for at in range(0, size, BLOCK))
    return start + size <= math.prod(masters.shape) and all(
        np.array_equal(converted(part_of(masters, start + at, n).whole(), masters.dtype, weight.dtype), own.whole())
        for at, n in blocks
        for own in [part_of(weight, at, n)]
    )
