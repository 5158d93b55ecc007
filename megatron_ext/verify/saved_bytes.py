"""Bytes of activations that autograd holds between a forward pass and its backward pass."""

from collections.abc import Callable, Iterable

import torch


def bytes_held_for_backward(forward: Callable[[], torch.Tensor], without: Iterable[torch.Tensor]) -> int:
    """Run `forward` and count the storages that its graph then holds, each once, however many tensors share it.

    What a checkpoint keeps to compute the rest anew counts; what it freed in the meantime does not.

    Args:
        forward: the forward pass; its graph is let go afterwards.
        without: tensors whose storages do not count: parameters and inputs.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor.detach()

    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
    held = sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in known)
    del output
    return held
