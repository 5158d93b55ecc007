"""Reads weights in another precision than the checkpoint was saved in.

A checkpoint of a 16-bit run holds a weight twice: `<weight>`, as the run computed with it, and the fp32 master that was
updated, `optimizer.state.param.<weight>`; one of an fp32 run holds it once. Whatever the precision of the two runs, the
training goes on with the fp32 values: weights are rounded from them once, and never from what was rounded before. Where
a checkpoint has 16-bit weights alone (a conversion, --no-save-optim), these are all there is.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext.checkpoint.native.optimizer_state import saved_parts
from megatron_ext.checkpoint.native.snapshot import Saveable
from megatron_ext.sharding.parts import MASTER

_Sharded = ShardedTensor | ShardedTensorFactory
_OF_MASTERS, _OF_MEGATRONS_MASTERS = f"optimizer.state.{MASTER}.", "optimizer.state.fp32_param."


SavedName = Callable[[str], str]
"""Maps our name of a tensor to the checkpoint's."""


def changed_precisions(
    run: Saveable, state_dict: Mapping[str, Any], saved: Mapping[str, Any], saved_name: SavedName
) -> list[str]:
    """Return the dtypes, other than the run's, in which the checkpoint holds weights of the run. Collective.

    Args:
        state_dict: where the model's tensors are to be read into.
        saved: the checkpoint's metadata of its tensors, by name.
    """
    weights = (_named(one, saved_name) for one in _weights(state_dict))
    own = {str(saved[name].properties.dtype) for one, name in weights if _is_in_another_dtype(one, saved.get(name))}
    of_all: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(of_all, sorted(own))
    return sorted({dtype.removeprefix("torch.") for dtypes in of_all for dtype in dtypes})


def are_saved(saved: Iterable[str]) -> bool:
    """Return whether a checkpoint with tensors of these names has fp32 masters."""
    return any(name.startswith((_OF_MASTERS, _OF_MEGATRONS_MASTERS)) for name in saved)


def read_from_masters(state_dict: Mapping[str, Any], saved: Mapping[str, Any], saved_name: SavedName) -> dict[str, Any]:
    """Have weights that the checkpoint holds in another dtype read from their fp32 masters where it has such, and the
    run's masters from its weights where it has none. In place.

    Returns:
        The part of the state dict that the masters are read into, taken out of it: no tensor is read twice at a time.
    """
    for one in _weights(state_dict):
        _, name = _named(one, saved_name)
        if _is_in_another_dtype(one, saved.get(name)) and saved_name(_OF_MASTERS + name) in saved:
            one.key = _OF_MASTERS + one.key
    own = state_dict.get("optimizer", {}).pop(MASTER, {})
    for one in _sharded(own):
        if saved_name(one.key) not in saved:
            one.key = one.key.removeprefix(_OF_MASTERS)
    return {"optimizer": {MASTER: own}} if own else {}


def _weights(state_dict: Mapping[str, Any]) -> Iterator[_Sharded]:
    for chunk, tensors in state_dict.items():
        if chunk.startswith("model"):
            yield from _sharded(tensors)


def _sharded(tensors: Any) -> Iterator[_Sharded]:
    return (one for one in nested_values(tensors) if isinstance(one, ShardedTensor | ShardedTensorFactory))


def _named(one: _Sharded, saved_name: SavedName) -> tuple[_Sharded, str]:
    """Return the tensor with the name under which the checkpoint has it."""
    return one, saved_name(saved_parts(one)[0].key)


def _is_in_another_dtype(one: _Sharded, entry: Any) -> bool:
    assert one.data is not None
    return entry is not None and entry.properties.dtype != one.data.dtype
