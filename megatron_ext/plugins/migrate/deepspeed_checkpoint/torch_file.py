"""Reads what `torch.save` wrote of tensors and other things, as data: nothing of it is made, imported or called.

content = read("layer_03-model_00-model_states.pt")
content["input_layernorm.weight"].rows(0, 64)      # an Entry: where the elements lie in the file
"""

import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.dtypes import WIDTH
from megatron_ext.checkpoint.native.torch_archive import dtype_of_storage, find_records
from megatron_ext.errors import DataError
from megatron_ext.plugins.huggingface.safetensors import Entry
from megatron_ext.untrusted import inert_pickle
from megatron_ext.untrusted.inert_pickle import Global, Made, Stored

_LARGEST = 1 << 28  # bytes of a pickle; one of a rank with its flags and names has some 100,000
_DEEPEST = 50
_MOST = 1_000_000  # values: lists that hold one another many times would be followed for years
_TENSOR, _PARAMETER = (Global("torch._utils", f"_rebuild_{kind}") for kind in ("tensor_v2", "parameter"))


def read(path: Path) -> Any:
    """Return the content: numbers, texts, lists, tuples and dictionaries, with an `Entry` for each tensor of weights.
    An object is the dictionary of its attributes, or None where it has none.

    Raises:
        DataError: the file is damaged, or no archive as `torch.save` writes them (since torch 1.6).
    """
    try:
        records = find_records(path)
        at, size = records["data.pkl"]
        if size > _LARGEST:
            raise pickle.UnpicklingError(f"its pickle has {size:,} bytes, more than any checkpoint's")
        with path.open("rb") as file:
            content = os.pread(file.fileno(), size, at)
        return _plain(inert_pickle.read(content, None, stored=True), path, records, [_MOST], 0)
    except (pickle.UnpicklingError, KeyError, ValueError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(
            f"{path} cannot be read: {error}. Take another checkpoint, or write it anew with torch.save"
        ) from error


def _plain(value: Any, path: Path, records: Mapping[str, tuple[int, int]], left: list[int], depth: int) -> Any:
    left[0] -= 1
    if depth > _DEEPEST or left[0] < 0:
        raise pickle.UnpicklingError(f"it has more than {_DEEPEST} levels or {_MOST:,} values")

    def inner(one: Any) -> Any:
        return _plain(one, path, records, left, depth + 1)

    if isinstance(value, dict):
        return {key: inner(one) for key, one in value.items() if isinstance(key, str | int)}
    if isinstance(value, list | tuple):
        return type(value)(inner(one) for one in value)
    if not isinstance(value, Made):
        return None if isinstance(value, Global | Stored) else value
    if value.kind == _TENSOR:
        return _entry(value.args, path, records)
    if value.kind == _PARAMETER:
        return inner(value.args[0])
    if value.kind == Global("collections", "OrderedDict"):
        return inner(dict(value.items))
    if value.state is None and len(value.args) == 1:
        return inner(value.args[0])  # of an enumeration, its value
    return inner(value.state) if isinstance(value.state, dict) else None


def _entry(args: tuple[Any, ...], path: Path, records: Mapping[str, tuple[int, int]]) -> Entry | None:
    """Return where the elements of a tensor lie; None of one that is none of weights, or not in order."""
    stored, start, shape, strides, *_ = args
    _, storage, key, *_ = stored.place
    dtype, (at, size) = dtype_of_storage(storage), records[f"data/{key}"]
    in_order = [math.prod(shape[dimension + 1 :]) for dimension in range(len(shape))]
    axes = [axis for axis, length in enumerate(shape) if length != 1]
    if dtype not in WIDTH or any(strides[axis] != in_order[axis] for axis in axes):
        return None
    if min((start, *shape)) < 0 or (start + math.prod(shape)) * WIDTH[dtype] > size:
        raise pickle.UnpicklingError("a tensor reaches beyond its elements")
    return Entry(path, dtype, tuple(shape), at + start * WIDTH[dtype])
