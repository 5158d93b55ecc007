"""Rules about operations that take the place of several: what each cannot be used with."""

from collections.abc import Iterator

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config


def linear_cross_entropy_is_exact(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse --linear-cross-entropy where it would lose small numbers, or a part of the loss."""
    if not config.training.linear_cross_entropy:
        return
    if config.model.z_loss_strength:
        yield (
            f"--z-loss-strength {config.model.z_loss_strength:g} needs the logits, of which --linear-cross-entropy "
            "keeps none; leave --linear-cross-entropy out"
        )
    if config.training.fp16:
        yield (
            "--linear-cross-entropy has probabilities in 16 bits before the loss scale is applied, and --fp16 holds "
            "none below 6e-8; use --bf16 instead of --fp16, or leave --linear-cross-entropy out"
        )


def products_add_to_main_gradients(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse --gradient-accumulation-fusion where there is no main gradient to add to, or nobody adds."""
    if not config.training.gradient_accumulation_fusion:
        return
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


RULES = (linear_cross_entropy_is_exact, products_add_to_main_gradients)
