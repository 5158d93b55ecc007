"""Finds settings that work, for the text of a problem: candidates are tried against the rules that they must meet."""

import math
from collections.abc import Iterable, Iterator

from megatron_ext.config.derived.layer_patterns import Counted, read_pattern
from megatron_ext.config.derived.pipeline_split import counted_as_layers, read_pipeline_layout
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import positive
from megatron_ext.config.schema import Config
from megatron_ext.errors import listed


def divisors(value: int) -> list[int]:
    """Return all divisors in rising order; of an absurd value those up to 100,000 and their counterparts, at once."""
    small = [n for n in range(1, min(math.isqrt(value), 100_000) + 1) if value % n == 0]
    return small + [value // n for n in reversed(small) if n * n != value]


def groups_fit(query_groups: int, tensor_size: int) -> bool:
    """Return whether the query groups are a multiple or a divisor of the tensor-parallel size, as megatron-core
    demands."""
    return query_groups % tensor_size == 0 or tensor_size % query_groups == 0


def tensor_sizes(config: Config) -> list[int]:
    """Return the tensor-parallel sizes that suit the heads, the query groups, the MLP, the sequence and the world
    size."""
    model, layout = config.model, config.layout
    if not positive(model.num_attention_heads):
        return []
    return [
        size
        for size in divisors(model.num_attention_heads)
        if all(not positive(groups) or groups_fit(groups, size) for groups in model.key_value_heads.values())
        and (not positive(model.ffn_hidden_size) or model.ffn_hidden_size % size == 0)
        and (not positive(model.padded_vocab_size) or model.padded_vocab_size % size == 0)
        and (not layout.sequence_parallel or not positive(model.seq_length) or model.seq_length % size == 0)
        and _fills_world(layout.world_size, size * layout.context_parallel_size * layout.pipeline_model_parallel_size)
    ]


def pipeline_sizes(config: Config) -> list[int]:
    """Return the pipeline sizes over which the layers and the world size divide, with as many model chunks as now."""
    layout = config.layout
    return [
        size
        for size in _splits(config)
        if (size > 1 or layout.virtual_pipeline_model_parallel_size == 1)
        and _fills_world(layout.world_size, size * layout.context_parallel_size * layout.tensor_model_parallel_size)
    ]


def _splits(config: Config) -> list[int]:
    """Return the pipeline sizes over which the layers divide, the flags of uneven stages kept."""
    layout, layers = config.layout, config.model.num_layers
    chunks = layout.virtual_pipeline_model_parallel_size
    if not positive(layers, chunks):
        return []
    if layout.pipeline_model_parallel_layout is not None:
        try:
            total = len(read_pipeline_layout(layout.pipeline_model_parallel_layout))
        except ValueError:
            return []
        return [size for size in divisors(total) if size > 1 or total == 1]
    ends = [layout.decoder_first_pipeline_num_layers, layout.decoder_last_pipeline_num_layers]
    of_ends = [layers_of_one for layers_of_one in ends if layers_of_one is not None]
    between = layers + counted_as_layers(layout) - sum(of_ends)
    return [len(of_ends) + n for n in divisors(max(between, 0)) if between % (n * chunks) == 0]


def nearest_multiples(value: int, of: int) -> list[int]:
    """Return the multiples around a value, without 0: (30, 4) -> [28, 32]."""
    below = value // of * of
    return [multiple for multiple in (below, below + of) if multiple > 0]


def unreadable_pattern(
    flag: str, pattern: str | None, layers: int, fix: str, counted: Counted = "all but the last"
) -> Iterator[str]:
    """Yield that a pattern over the layers cannot be read, where that is so; `fix` is a value that works."""
    try:
        if pattern is not None and positive(layers):
            read_pattern(pattern, min(layers, 100_000), counted)
    except ValueError:
        yield (
            f"{flag} {pattern} is neither a number of layers nor a list of {layers} times 0 or 1 (--num-layers); use "
            f"{flag} {fix}"
        )


def use(flag: str, values: Iterable[object], otherwise: str = "") -> str:
    """Return `use --flag 1, 2 or 4`; the fallback where no value works."""
    values = list(values)
    return f"use {flag} {listed(values)}" if values else otherwise


def _fills_world(world_size: int, model_parallel_size: int) -> bool:
    return not positive(world_size, model_parallel_size) or world_size % model_parallel_size == 0


def wrong_factors(name: str, factors: tuple[float, ...] | None, count: int, has_any: object, of: str) -> Iterator[str]:
    """Yield a problem if a field of factors does not have `count` numbers above 0, or if the factors multiply nothing.

    Args:
        has_any: whether the model has anything that they multiply.
        of: the setting that gives the model such a part, for the message.
    """
    flag = flag_of(name)
    if factors is None:
        return
    if len(factors) != count or min(factors) <= 0:
        given = " ".join(f"{factor:g}" for factor in factors)
        yield f"{flag} {given} must be {count} numbers above 0; use for example {' '.join(['1'] * count)}"
    elif not has_any:
        yield f"{flag} needs {of}; leave {flag} out"
