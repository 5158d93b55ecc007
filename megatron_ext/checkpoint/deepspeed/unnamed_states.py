"""Finds the masters and Adam's states of 16-bit runs without ZeRO, whose optimizers keep vectors without names.

    find_states([read("mp_rank_00_model_states.pt")], weights)["exp_avg"]["3.mlp.dense_4h_to_h.weight"]

Such a vector has all parameters of a group one after another (`fp32_groups_flat` of deepspeed's
runtime/fp16/fused_optimizer.py), or one parameter (`fp32_groups` of unfused_optimizer.py). Its next parameter is the
first one of the model that has no state yet and whose weights the masters are, once rounded to its 16 bits.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron_ext.checkpoint.copying import BLOCK
from megatron_ext.checkpoint.deepspeed.zero_shards import Pieces
from megatron_ext.checkpoint.huggingface.safetensors import Entry


def find_states(files: Sequence[Any], weights: Mapping[str, Any]) -> dict[str, dict[str, Pieces]]:
    """Return of each state (param, exp_avg, exp_avg_sq) the tensors that have been found, by DeepSpeed's names.

    Args:
        files: contents that the pipeline stages of a tensor-parallel rank have saved, with their optimizers.
        weights: tensors of the rank, in the model's order.
    """
    found: dict[str, dict[str, Pieces]] = {"param": {}, "exp_avg": {}, "exp_avg_sq": {}}
    left = {name: one for name, one in weights.items() if isinstance(one, Entry) and one.dtype in ("BF16", "F16")}
    for content in files:
        with suppress(KeyError, IndexError, TypeError, AttributeError):  # another optimizer's
            saved = content["optimizer"]
            masters = saved.get("fp32_groups_flat") or [one for group in saved["fp32_groups"] for one in group]
            for number, master in enumerate(masters):
                states = {**saved["optimizer_state_dict"]["state"][number], "param": master}
                vectors = {state: _part(states[state]) for state in found}
                if len({(vector.dtype, vector.shape) for vector in vectors.values()}) > 1:
                    continue
                at = 0
                while name := next((name for name in left if _rounds(vectors["param"], at, left[name])), None):
                    shape = left.pop(name).shape
                    for state, vector in vectors.items():
                        found[state][name] = Pieces(vector.dtype, shape, (_part(vector, at, math.prod(shape)),))
                    at += math.prod(shape)
    return found


def _part(entry: Entry, start: int = 0, size: int | None = None) -> Entry:
    vector = Entry(entry.path, entry.dtype, (math.prod(entry.shape),), entry.offset)
    return Entry(entry.path, entry.dtype, vector.shape if size is None else (size,), vector.offset_of(start))


def _rounds(masters: Entry, start: int, weight: Entry) -> bool:
    """Return whether the masters from `start` on are these weights, once rounded."""
    import numpy as np

    from megatron_ext.checkpoint.huggingface.arrays import converted

    values, size = _part(weight), math.prod(weight.shape)
    return start + size <= masters.shape[0] and all(
        np.array_equal(converted(masters.rows(start + at, count), masters.dtype, weight.dtype), values.rows(at, count))
        for at in range(0, size, BLOCK)
        for count in [min(BLOCK, size - at)]
    )
