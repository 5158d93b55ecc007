"""Which of torch's operators a piece of code calls."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten: Any = torch.ops.aten


class Calls(TorchDispatchMode):
    """Every operator that was called, its arguments, and what it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Sequence[Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.calls.append((func, args, returned))
        return returned

    def of(self, operator: Any) -> tuple[Sequence[Any], Any]:
        """Arguments and result of the one call of an operator."""
        (found,) = [(args, returned) for func, args, returned in self.calls if func is operator.default]
        return found
