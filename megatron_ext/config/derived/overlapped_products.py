"""Finds the obstacles to `--tp-comm-overlap`: settings under which products of tensor-parallel layers wait for what
they send, as without it.

The flag is about speed alone. It is refused with flags of this program that have products of their own; what a script
for Megatron-LM may ask for besides trains on without it, and one warning says why.
"""

from collections.abc import Iterator

from megatron_ext.config.derived.pipeline_split import splits_backward
from megatron_ext.config.schema import Config
from megatron_ext.registry import brought


def overlaps(config: Config) -> bool:
    """Return whether tensor-parallel layers multiply while they communicate, on a GPU that can."""
    return config.layout.tp_comm_overlap and in_the_way(config) is None and not any(conflicts(config))


def in_the_way(config: Config) -> str | None:
    """Return why the flag changes nothing; None if it does."""
    for flag in filter(None, (formats.asked(config) for formats in brought("product_formats"))):
        return f"products of {flag} round what they gather first"
    if config.model.transformer_impl == "transformer_engine":
        return "with --transformer-impl transformer_engine the linear layers are not ours"
    return None


def conflicts(config: Config) -> Iterator[str]:
    """Yield the flags that have products of their own."""
    if config.layout.sequence_parallel_keep_gathered:
        yield "--sequence-parallel-keep-gathered"
    if config.training.torch_compile:
        yield "--torch-compile"
    if splits_backward(config.layout):
        yield f"--pipeline-schedule {config.layout.pipeline_schedule}"
