"""Rules about how products are computed by operations that take the place of several."""

from collections.abc import Iterator

from megatron_ext.config.derived.gradient_sums import obstacles
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.rules.reads import reads


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


@reads()
def products_add_to_main_gradients(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse --gradient-accumulation-fusion if there is no main gradient to add to, or no product adds to it."""
    if config.training.gradient_accumulation_fusion:
        yield from obstacles(config)


RULES = (linear_cross_entropy_is_exact, products_add_to_main_gradients)
