"""Adds up the numbers that parts report of a training step (`parts/protocol.Number`), on the device.

A module records in its forward pass. Who runs the passes takes the sums afterwards, and knows none by name.

    with numbers.recording():
        ...                         # in a layer, in every microbatch: record(INDEXER_LOSS, loss)
    numbers.sums()
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron_ext.parts.protocol import Number

_current: "RecordedNumbers | None" = None
"""Object into which this process records; None outside of a step's passes. A module knows no run that it could ask."""


def record(number: Number, value: torch.Tensor) -> None:
    """Record a number of one part and one microbatch, without waiting for the device.

    Nothing is recorded outside of a step's passes, nor without gradients: in the first of two forward passes where
    activations are recomputed.

    Args:
        value: scalar. It is this rank's share: the sum over the ranks that share the microbatch is the number. If the
            largest is reported, it is the largest of this rank.
    """
    if _current is not None and torch.is_grad_enabled():
        _current.add(number, value.detach())


class RecordedNumbers:
    """Numbers that this rank has recorded in a step.

    Args:
        numbers: the numbers that parts of the model report, and how many parts report each; the same on all ranks.
        replicas: number of data-parallel ranks.
        device: where the modules compute.
    """

    def __init__(self, numbers: Mapping[Number, int], replicas: int, device: torch.device):
        self._parts, self._replicas = numbers, replicas
        self.summed = [number for number in numbers if number.mean != "largest"]
        """Numbers whose records are added up."""
        self._compared = [number for number in numbers if number.mean == "largest"]
        self._sums = torch.zeros(len(self.summed), dtype=torch.float64, device=device)
        self._largest = torch.zeros(len(self._compared), dtype=torch.float64, device=device)
        pairs = ((self.summed, self._sums), (self._compared, self._largest))
        self._cells = {number: cell for names, vector in pairs for number, cell in zip(names, vector, strict=True)}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Return a context in which modules record into this object; earlier records are forgotten."""
        global _current
        self._sums.zero_()
        self._largest.fill_(-torch.inf)
        get_moe_metrics_tracker().clear()
        before, _current = _current, self
        try:
            yield
        finally:
            _current = before

    def add(self, number: Number, value: torch.Tensor) -> None:
        """Record a scalar; the sums stay where they are, so that a CUDA graph may do it."""
        cell = self._cells[number]
        if number.mean == "largest":
            torch.maximum(cell, value, out=cell)
        else:
            cell += value

    def sums(self) -> torch.Tensor:
        """Return this rank's sums of the `summed` numbers, fp64, one for each."""
        sums = self._sums.clone()
        for cell, number in zip(sums, self.summed, strict=True):
            if number.name in get_moe_metrics_tracker().metrics:
                cell += self._of_engine(number.name)
        return sums

    def largest(self) -> torch.Tensor:
        """Return the largest records of the other numbers on this rank, fp64, one for each; -infinity for none."""
        return self._largest.clone()

    def by_name(
        self, sums: Sequence[float], largest: Sequence[float], *, microbatches: int, tokens: int
    ) -> dict[str, float]:
        """Return the numbers of a step by their names.

        Args:
            sums: of all ranks, in the order of `sums`.
            largest: of all ranks, in the order of `largest`.
            microbatches: microbatches of one data-parallel rank.
            tokens: tokens of the global batch that count in the loss.
        """
        totals = {**dict(zip(self.summed, sums, strict=True)), **dict(zip(self._compared, largest, strict=True))}
        of_all = microbatches * self._replicas
        return {one.name: one.of(totals[one], parts, of_all, tokens) for one, parts in self._parts.items()}

    def with_values(self, values: Mapping[str, float]) -> tuple[tuple[Number, float], ...]:
        """Return the numbers that have a value, by their names, with it; a step without passes has none."""
        return tuple((one, values[one.name]) for one in self._parts if one.name in values)

    def _of_engine(self, name: str) -> torch.Tensor:
        """Return the sum of a number that megatron-core's own modules record in its tracker: shares of the ranks that
        share a microbatch, or, with `avg_group`, the mean over each rank's tokens."""
        entry = get_moe_metrics_tracker().metrics[name]
        total = entry.values.sum().double()
        return total if entry.avg_group is None else total / (entry.avg_group.size() // self._replicas)
