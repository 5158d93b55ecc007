"""Tensors of checkpoints by name, and what differs between two of them."""

from typing import Any

import torch

from megatron_ext.plugins.checkpoint_tools.tensors import Tensors, differences


class _Held:
    """Tensors without a file."""

    def __init__(self, path: str, **values: torch.Tensor):
        self.path, self.values = path, values

    def names(self) -> list[str]:
        return list(self.values)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        return self.values[name].dtype

    def read(self, name: str) -> torch.Tensor:
        return self.values[name]


def test_tensors_that_differ_are_named_with_how_much() -> None:
    """Bit for bit: a zero with a sign is another one, and NaN is as NaN."""
    nan = torch.tensor([float("nan")])
    one: Any = _Held("A", same=nan, zero=torch.zeros(1), w=torch.tensor([3.0, 4.0]), form=torch.ones(2), a=nan)
    other: Any = _Held("B", same=nan, zero=-torch.zeros(1), w=torch.tensor([3.0, 4.5]), form=torch.ones(2, 1), b=nan)
    assert list(differences(one, other)) == [
        "zero: largest difference 0.000e+00, norm of the difference 0.000e+00 of the norm",
        "w: largest difference 5.000e-01, norm of the difference 1.000e-01 of the norm",
        "form: [2] float32 and [2, 1] float32",
        "a: only in A",
        "b: only in B",
    ]


def test_weights_are_listed_before_the_optimizers_state() -> None:
    made: Any = object.__new__(Tensors)
    made._entries = dict.fromkeys(("optimizer.state.exp_avg.a", "z.weight", "b.weight", "optimizer.state.exp_avg"))
    assert made.names() == ["b.weight", "z.weight", "optimizer.state.exp_avg", "optimizer.state.exp_avg.a"]
