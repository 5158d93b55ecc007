"""Rules of products in eight and four bits."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.plugins.low_precision.flags import LowPrecisionFlags
from megatron_ext.plugins.low_precision.formats import (
    asked,
    chosen_layers,
    gathers_in_eight_bits,
    gathers_whole,
    recipe_of,
    with_recipe,
)
from megatron_ext.plugins.low_precision.widths import matrices_of, widths_that_fit
from megatron_ext.rules.reads import reads
from megatron_ext.rules.suggest import groups_fit, listed


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
    matrices = _matrices(config)
    if matrices is None:
        return  # refused by others
    side = recipe_of(config).multiple
    wrong = [f"{name} has {rows} x {columns}" for name, (rows, columns) in matrices if rows % side or columns % side]
    if wrong:
        yield (
            f"{with_recipe(config, ' with ')} takes matrices whose sides on a rank are multiples of {side}, and "
            f"{listed(wrong)}; {widths_that_fit(config, side)}{_smaller(config)}leave {flag.split()[0]} out"
        )


def _matrices(config: Config) -> list[tuple[str, tuple[int, ...]]] | None:
    """Return name and shape on a rank of the matrices of each kind of layer that are multiplied in few bits; None where
    tensor-parallel ranks cannot divide one."""
    found = matrices_of(config)
    if any(size % ranks for _, shape, over in found for size, ranks in zip(shape, over, strict=True)):
        return None
    return [(name, tuple(size // n for size, n in zip(shape, over, strict=True))) for name, shape, over in found]


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


def gathered_in_full(_given: Mapping[str, Any], config: Config, _facts: Facts) -> Iterator[str]:
    """Warn where --fp8-param-gather changes nothing, or not for all weights."""
    if not flags_of(config.training, LowPrecisionFlags).fp8_param_gather:
        return
    reason = gathers_whole(config)
    if reason is not None:
        yield f"--fp8-param-gather changes nothing here: {reason}"
        return
    names = [each for each, shape in _matrices(config) or () if not gathers_in_eight_bits(config, shape)]
    if names:
        yield (
            f"--fp8-param-gather: the ranks of --use-torch-fsdp2 have unequal numbers of rows of {listed(names)}, "
            "which are gathered in bf16"
        )


def all_else_is_in_fp32(_given: Mapping[str, Any], config: Config, _facts: Facts) -> Iterator[str]:
    """Warn that few bits without --bf16 leave everything around these products in fp32."""
    flag, training = asked(config), config.training
    if flag is None or training.mixed_precision:
        return
    left = (
        ", and --first-last-layers-bf16 leaves layers in it"
        * flags_of(training, LowPrecisionFlags).first_last_layers_bf16
    )
    yield f"{flag} without --bf16: all that is around these products is computed in fp32{left}; add --bf16"


WARNINGS = (gathered_in_full, all_else_is_in_fp32)

RULES = (
    few_bits_have_layers_of_their_own,
    few_bits_take_whole_blocks,
    few_bits_sum_over_whole_blocks_of_tokens,
    few_bits_of_experts_see_whole_microbatches,
)
