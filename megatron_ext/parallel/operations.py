"""Wraps the methods of torch's process groups, which every collective and message passes.

megatron-core keeps references to torch's functions, but not to these methods.
"""

from collections.abc import Callable
from typing import Any

MESSAGES = ("send", "recv", "recv_anysource")
COLLECTIVES = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "gather",
    "gather_single",
    "gather_into_tensor",
    "scatter",
    "barrier",
)
END_OF_BATCH = "_end_coalescing"  # starts what was put together: messages, or collectives


def group_title(name: str, purpose: str) -> str:
    """Return the name for people of a process group.

    Args:
        name: torch's name of it.
        purpose: its description, such as megatron-core's TENSOR_MODEL_PARALLEL_GROUP.
    """
    if purpose == "default_pg":
        return "the group of all ranks"
    if purpose in ("", "undefined"):
        return f"the group {name}"
    return f"the group {purpose.lower().removesuffix('_group').replace('_', '-')}"


class WrappedMethods:
    """Replaces methods of classes, and puts them back."""

    def __init__(self) -> None:
        self._originals: list[tuple[type, str, Any]] = []

    def wrap(self, owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Put `wrapper` of the method in its place; does nothing where the class does not have it (names come and go
        with torch's versions)."""
        if hasattr(owner, name):
            # The class's own attribute, not the result of getattr: put back, that would not be bound to an object.
            self._originals.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, wrapper(getattr(owner, name)))

    def put_back(self) -> None:
        """Undo every `wrap`, the last one first."""
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is None:
                delattr(owner, name)  # it is inherited
            else:
                setattr(owner, name, original)
