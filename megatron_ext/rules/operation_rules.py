"""Rules about how products are computed: by operations that take the place of several, and in FP8."""

import math
from collections.abc import Iterator

from megatron_ext.config.derived.gradient_sums import obstacles
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config
from megatron_ext.parts.catalogue import layer_parameters, tensor_size
from megatron_ext.parts.linear.describe import FP8_BLOCK, layers_in_fp8, multiple_of
from megatron_ext.parts.stack import stack
from megatron_ext.rules.reads import reads
from megatron_ext.rules.suggest import groups_fit, listed


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


@reads()
def fp8_has_layers_of_its_own(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse --fp8-format where it reaches no layer, and next to another scale of gradients."""
    model, training = config.model, config.training
    if training.fp8_format is None:
        return
    if training.fp16:
        yield (
            f"--fp8-format {training.fp8_format} with --fp16 was never tried: gradients have two scales then; "
            "use --bf16 instead of --fp16"
        )
    if positive(model.num_layers) and not layers_in_fp8(config):
        start, end = training.num_layers_at_start_in_bf16, training.num_layers_at_end_in_bf16
        yield (
            f"--num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 {end} leave none of --num-layers "
            f"{model.num_layers} in FP8; leave --fp8-format out, or leave --first-last-layers-bf16 out"
        )


@reads()
def fp8_takes_whole_blocks(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the matrices that a rank multiplies in FP8 have sides that the kernels take."""
    model, layout, training = config.model, config.layout, config.training
    tensor = layout.tensor_model_parallel_size
    sizes = (model.hidden_size, model.num_attention_heads, model.ffn_hidden_size, model.kv_channels, tensor)
    if training.fp8_format is None or model.num_experts is not None or not positive(*sizes, model.num_layers):
        return
    groups = model.key_value_heads.values()
    if not positive(*groups) or any(size % tensor for size in (model.num_attention_heads, model.ffn_hidden_size)):
        return  # refused by others
    if not all(groups_fit(one, tensor) for one in groups):
        return  # refused by others
    side = multiple_of(config)
    wrong = []
    for kind, _ in stack(config).kinds:
        for parameter in layer_parameters(config, kind, experts=()):
            name = parameter.name.removeprefix(f"decoder.layers.{kind.number}.")
            shape = parameter.local_shape(tensor_size(config, parameter))
            if "linear_" in name and len(shape) == 2 and any(size % side for size in shape):
                wrong.append(f"{name} has {shape[0]} x {shape[1]}")
    if wrong:
        yield (
            f"--fp8-format {training.fp8_format} with --fp8-recipe {training.fp8_recipe} takes matrices whose sides on "
            f"a rank are multiples of {side}, and {listed(wrong)}; {_smaller(config)}leave --fp8-format out"
        )


@reads("micro batch")
def fp8_sums_over_whole_blocks_of_tokens(config: Config, facts: Facts) -> Iterator[str]:
    """Require as many tokens in a microbatch as the product for a weight's gradient can sum over."""
    model, layout, training = config.model, config.layout, config.training
    sizes = (model.seq_length, training.micro_batch_size, layout.context_parallel_size)
    if training.fp8_format is None or not positive(*sizes):
        return
    # A context-parallel rank has two chunks of each sample, and a block must not reach into the other.
    blockwise = training.fp8_recipe == "blockwise"
    chunks = layout.context_parallel_size * (2 if blockwise and layout.context_parallel_size > 1 else 1)
    if model.seq_length % chunks:
        return
    length, side = model.seq_length // chunks, multiple_of(config)
    tokens = length * training.micro_batch_size
    if tokens % side:
        what = "a chunk" if blockwise and chunks > 1 else "a rank"
        yield (
            f"--fp8-format {training.fp8_format} with --fp8-recipe {training.fp8_recipe} sums over a multiple of "
            f"{side} tokens, and {what} has {tokens} of a microbatch (--seq-length {model.seq_length}, "
            f"--micro-batch-size {training.micro_batch_size}, --context-parallel-size {layout.context_parallel_size}); "
            f"use --micro-batch-size {side // math.gcd(length, side)}, or {_smaller(config)}leave --fp8-format out"
        )


def _smaller(config: Config) -> str:
    """Return the other recipe that may do, for a message."""
    return "use --fp8-recipe rowwise, or " if multiple_of(config) == FP8_BLOCK else ""


RULES = (
    linear_cross_entropy_is_exact,
    products_add_to_main_gradients,
    fp8_has_layers_of_its_own,
    fp8_takes_whole_blocks,
    fp8_sums_over_whole_blocks_of_tokens,
)
