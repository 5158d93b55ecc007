"""The flag of layers with attention and Mamba-2 side by side."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import Choice, option
from megatron_ext.plugins.mamba.flags import BESIDE_ATTENTION, PATTERN


@dataclass(frozen=True)
class SideBySideFlags:
    """Options of layers with attention and Mamba-2 side by side."""

    mixer_multipliers: tuple[float, ...] | None = option(
        None,
        "Factors of the outputs of attention and of Mamba-2 in layers that have both side by side (letter B); "
        "default 1.",
        resume="function",
        read_with=PATTERN,
    )


FLAGS = (("model", SideBySideFlags),)
CHOICES = (Choice("hybrid_layer_pattern", BESIDE_ATTENTION, words="attention and Mamba-2 side by side"),)
