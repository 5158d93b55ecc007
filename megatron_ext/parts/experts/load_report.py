"""Says how the load of each layer's experts is reported: in the metrics file, in tags, and as a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_ext.parts.experts.load_colour import load_colour
from megatron_ext.parts.protocol import Report

MOST_COUNTS_OF_A_ROW = 16_384
"""Most tokens of experts that a row holds, some 80 kB: 61 layers of 256 experts."""

_SQUARE = 8  # pixels


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """The load of one layer's experts in a step, over the global batch."""

    layer: int
    """Its index; depths of multi-token prediction follow the last layer."""

    tokens: tuple[int, ...]
    """Tokens of each expert."""

    dropped: float
    """Share of the choices of an expert for a token that were dropped."""

    router_z: float
    """Mean squared logsumexp of the router's logits."""

    bias: tuple[float, float] | None
    """The least and the greatest bias by which experts are chosen; None without biases."""

    @property
    def max_over_mean(self) -> float:
        """Tokens of the busiest expert over the tokens of each expert in an even load; 1 is even."""
        return max(self.tokens) * len(self.tokens) / max(sum(self.tokens), 1)

    @property
    def entropy(self) -> float:
        """Entropy of the experts' shares over the entropy of an even load; 1 is even, 0 is one expert alone."""
        total = sum(self.tokens)
        shares = [count / total for count in self.tokens if count]
        return -sum(share * math.log(share) for share in shares) / math.log(len(self.tokens) or 1)

    def as_row(self) -> dict[str, Any]:
        """Return the object of the metrics file."""
        row: dict[str, Any] = {"layer": self.layer, "max_over_mean": self.max_over_mean, "entropy": self.entropy}
        row |= {"without_tokens": self.tokens.count(0), "dropped": self.dropped, "router_z": self.router_z}
        return row if self.bias is None else row | {"bias": list(self.bias)}


def load_report(loads: Sequence[LayerLoad], *, has_capacity: bool) -> Report:
    """Return the report of the layers with experts.

    Args:
        loads: the load of each.
        has_capacity: whether choices may be dropped.
    """
    if not loads:
        return Report(row={}, tags={})
    row: dict[str, Any] = {"expert_load": [load.as_row() for load in loads]}
    tags = {tag: value for load in loads for tag, value in _tags(load).items()}
    if sum(len(load.tokens) for load in loads) <= MOST_COUNTS_OF_A_ROW:
        row["expert_tokens"] = [list(load.tokens) for load in loads]
    if has_capacity:
        dropped = {"dropped_share": sum(load.dropped for load in loads) / len(loads)}
        row, tags = {**row, **dropped}, {**tags, **dropped}
    return Report(row=row, tags=tags, pictures={"tokens of experts": _picture(loads)})


def _tags(load: LayerLoad) -> dict[str, float]:
    """Return the load of a layer's experts by tag, `expert-max-over-mean/layer 3` and the like."""
    values = load.as_row()
    least, greatest = values.pop("bias", (None, None))
    values |= {} if least is None else {"bias-least": least, "bias-greatest": greatest}
    number = values.pop("layer")
    return {f"expert-{name.replace('_', '-')}/layer {number}": value for name, value in values.items()}


def _picture(loads: Sequence[LayerLoad]) -> np.ndarray:
    """Return the picture of layers against experts, a square for each, [height, width, 3] bytes."""
    colours = np.zeros((len(loads), max(len(load.tokens) for load in loads), 3), np.uint8)
    for row, load in zip(colours, loads, strict=True):
        mean = sum(load.tokens) / len(load.tokens) or 1.0
        row[: len(load.tokens)] = [load_colour(count / mean) for count in load.tokens]
    return colours.repeat(_SQUARE, 0).repeat(_SQUARE, 1)
