"""Says where products that compute gradients of weights add them to the main gradients themselves: on GPUs by default,
as in Megatron (--gradient-accumulation-fusion)."""

from collections.abc import Iterator

from megatron_ext.config.schema import Config


def obstacles(config: Config) -> Iterator[str]:
    """Yield the reasons why products of a configuration cannot add to gradients, each a sentence for the user who asks
    for it."""
    for flag in config.layout.flags_that_divide_weights:
        yield (
            f"--gradient-accumulation-fusion adds to the main gradients of whole weights, and under {flag} there "
            "are none; leave --gradient-accumulation-fusion out"
        )
    if config.training.torch_compile:
        yield (
            "--gradient-accumulation-fusion writes main gradients inside the backward pass, which --torch-compile "
            "cannot follow; leave one of the two out"
        )
    if config.model.transformer_impl == "transformer_engine":
        yield (
            "--gradient-accumulation-fusion is for --transformer-impl local: Transformer Engine's layers with it were "
            "never run here; leave --gradient-accumulation-fusion out"
        )


def add_by_default(config: Config) -> bool:
    """Return whether products on GPUs add where no flag says so."""
    kept_gathers = config.layout.sequence_parallel_keep_gathered  # their layers have a product of their own
    return not config.training.no_gradient_accumulation_fusion and not kept_gathers and not any(obstacles(config))
