"""Counts bytes of activations that autograd holds between a forward pass and its backward pass."""

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


class HeldForBackward:
    """Counts, within its `with` block, the bytes that autograd holds between forward and backward passes: the most at
    any time of whole steps, with all microbatches in flight.

    Args:
        without: tensors whose storages do not count: parameters.
    """

    def __init__(self, without: Iterable[torch.Tensor]):
        self.most = self.now = 0
        self._without = {tensor.untyped_storage().data_ptr() for tensor in without}
        self._times: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._hold, lambda held: held.tensor)

    def __enter__(self) -> "HeldForBackward":
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _hold(self, tensor: torch.Tensor) -> "_Held":
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in self._without:
            return _Held(tensor.detach(), None, pointer)
        self._times[pointer] = self._times.get(pointer, 0) + 1
        if self._times[pointer] == 1:
            self.now += tensor.untyped_storage().nbytes()
            self.most = max(self.most, self.now)
        return _Held(tensor.detach(), self, pointer)

    def release(self, tensor: torch.Tensor, pointer: int) -> None:
        """Count off one of autograd's references to a storage, which it lets go of."""
        self._times[pointer] -= 1
        if self._times[pointer] == 0:
            self.now -= tensor.untyped_storage().nbytes()


class _Held:
    """Stands for a tensor that autograd keeps; the end of it is the end of the reference."""

    def __init__(self, tensor: torch.Tensor, counter: HeldForBackward | None, pointer: int):
        self.tensor, self.counter, self.pointer = tensor, counter, pointer

    def __del__(self) -> None:
        if self.counter is not None:
            self.counter.release(self.tensor, self.pointer)
