"""Says which layers multiply in FP8, and which sizes their kernels take."""

from megatron_ext.config.schema import Config

FP8_BLOCK = 128
"""Side of a block of --fp8-recipe blockwise."""

FP8_MULTIPLE = 16
"""Divisor of both sides of any FP8 matrix: matrix units of a GPU read rows of 16 bytes."""


def multiple_of(config: Config) -> int:
    """Return the divisor that both sides of every rank's matrices must have."""
    return FP8_BLOCK if config.training.fp8_recipe == "blockwise" else FP8_MULTIPLE


def layers_in_fp8(config: Config) -> range:
    """Return the numbers, from 0, of the layers whose linear layers multiply in FP8."""
    training, count = config.training, config.model.num_layers
    if training.fp8_format is None:
        return range(0)
    if not training.first_last_layers_bf16:
        return range(count)
    return range(training.num_layers_at_start_in_bf16, count - training.num_layers_at_end_in_bf16)
