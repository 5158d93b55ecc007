"""Rules of products in eight and four bits."""

import math
from collections.abc import Iterator

from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.parts.catalogue import layer_parameters, tensor_size
from megatron_ext.parts.stack import stack
from megatron_ext.plugins.low_precision.flags import LowPrecisionFlags
from megatron_ext.plugins.low_precision.formats import asked, chosen_layers, recipe_of, with_recipe
from megatron_ext.rules.reads import reads
from megatron_ext.rules.suggest import groups_fit, listed

_IN_FULL = ("down_proj",)
"""Projections to latents, which stay in the model's precision."""


@reads()
def few_bits_have_layers_of_their_own(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse products in few bits where they reach no layer, next to another scale of gradients, and in two formats."""
    model, training, flag = config.model, config.training, asked(config)
    flags = flags_of(training, LowPrecisionFlags)
    if flag is None:
        return
    if flags.fp8_format is not None and flags.fp4_format is not None:
        yield (
            f"--fp8-format {flags.fp8_format} and --fp4-format {flags.fp4_format} are two formats for the same "
            "products; leave --fp8-format out, or leave --fp4-format out"
        )
    if training.fp16:
        yield (f"{flag} with --fp16 was never tried: gradients have two scales then; use --bf16 instead of --fp16")
    if positive(model.num_layers) and not chosen_layers(config):
        start, end = flags.num_layers_at_start_in_bf16, flags.num_layers_at_end_in_bf16
        kind = "FP8" if "--fp8" in flag else "FP4"
        yield (
            f"--num-layers-at-start-in-bf16 {start} and --num-layers-at-end-in-bf16 {end} leave none of --num-layers "
            f"{model.num_layers} in {kind}; leave {flag.split()[0]} out, or leave --first-last-layers-bf16 out"
        )


@reads()
def few_bits_take_whole_blocks(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the matrices that a rank multiplies in few bits have sides of whole blocks."""
    model, tensor, flag = config.model, config.layout.tensor_model_parallel_size, asked(config)
    sizes = (model.hidden_size, model.num_attention_heads, model.ffn_hidden_size, model.kv_channels, tensor)
    if flag is None or not positive(*sizes, model.num_layers, config.layout.expert_tensor_size):
        return
    groups = model.key_value_heads.values()
    if not positive(*groups) or any(size % tensor for size in (model.num_attention_heads, model.ffn_hidden_size)):
        return  # refused by others
    if not all(groups_fit(one, tensor) for one in groups):
        return  # refused by others
    side = recipe_of(config).multiple
    wrong = []
    for kind, _ in stack(config).kinds:
        for parameter in layer_parameters(config, kind, experts=(0,)):
            name = parameter.name.removeprefix(f"decoder.layers.{kind.number}.")
            ranks = tensor_size(config, parameter)
            if parameter.tp_dim is not None and parameter.shape[parameter.tp_dim] % ranks:
                return  # refused by others
            shape = parameter.local_shape(ranks)
            if "linear_" not in name or len(shape) != 2 or any(each in name for each in _IN_FULL):
                continue
            if any(size % side for size in shape):
                wrong.append(f"{name} has {shape[0]} x {shape[1]}")
    if wrong:
        yield (
            f"{with_recipe(config, ' with ')} takes matrices whose sides on a rank are multiples of {side}, and "
            f"{listed(wrong)}; {_smaller(config)}leave {flag.split()[0]} out"
        )


@reads("micro batch")
def few_bits_sum_over_whole_blocks_of_tokens(config: Config, facts: Facts) -> Iterator[str]:
    """Require as many tokens in a microbatch as the product for a weight's gradient can sum over."""
    model, layout, training, flag = config.model, config.layout, config.training, asked(config)
    if flag is None or not positive(model.seq_length, training.micro_batch_size, layout.context_parallel_size):
        return
    # A context-parallel rank has two chunks of each sample, and a block must not reach into the other.
    recipe = recipe_of(config)
    has_blocks = recipe.summed_block is not None
    chunks = layout.context_parallel_size * (2 if has_blocks and layout.context_parallel_size > 1 else 1)
    if model.seq_length % chunks:
        return
    length, side = model.seq_length // chunks, recipe.multiple
    tokens = length * training.micro_batch_size
    if tokens % side:
        what = "a chunk" if has_blocks and chunks > 1 else "a rank"
        yield (
            f"{with_recipe(config, ' with ')} sums over a multiple of {side} tokens, and {what} has {tokens} of a "
            f"microbatch (--seq-length {model.seq_length}, --micro-batch-size {training.micro_batch_size}, "
            f"--context-parallel-size {layout.context_parallel_size}); use --micro-batch-size "
            f"{side // math.gcd(length, side)}, or {_smaller(config)}leave {flag.split()[0]} out"
        )


@reads()
def few_bits_of_experts_see_whole_microbatches(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the ranks of an expert see all tokens of a microbatch, of which it finds scales together, and in
    their order, where blocks are of several tokens."""
    layout, flag = config.layout, asked(config)
    tensor, context = layout.tensor_model_parallel_size, layout.context_parallel_size
    experts, expert_tensor = layout.expert_model_parallel_size, layout.expert_tensor_size
    if flag is None or config.model.num_experts is None or not positive(tensor, context, experts, expert_tensor):
        return
    out = f"leave {flag.split()[0]} out"
    if experts * expert_tensor % (tensor * context):
        yield (
            f"{flag} finds the scales of an expert's tokens together over a microbatch, which "
            f"--tensor-model-parallel-size {tensor} and --context-parallel-size {context} divide over "
            f"{tensor * context} ranks, and --expert-model-parallel-size {experts} with --expert-tensor-parallel-size "
            f"{expert_tensor} brings {experts * expert_tensor} together; use --expert-tensor-parallel-size "
            f"{tensor * context}, or {out}"
        )
    recipe = recipe_of(config)
    if context > 1 and (recipe.summed_block is not None or recipe.is_random):
        yield (
            f"{with_recipe(config, ' with ')} rounds blocks of an expert's tokens in their order, and "
            f"--context-parallel-size {context} divides it; use --context-parallel-size 1, or {_smaller(config)}{out}"
        )


def _smaller(config: Config) -> str:
    """Return the other recipe that may do, for a message."""
    in_fp8 = flags_of(config.training, LowPrecisionFlags).fp8_format is not None
    return "use --fp8-recipe rowwise, or " if in_fp8 and recipe_of(config).summed_block is not None else ""


RULES = (
    few_bits_have_layers_of_their_own,
    few_bits_take_whole_blocks,
    few_bits_sum_over_whole_blocks_of_tokens,
    few_bits_of_experts_see_whole_microbatches,
)
