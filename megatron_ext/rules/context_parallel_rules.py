"""Rules about samples that are divided: between context-parallel ranks, or into documents."""

import math
from collections.abc import Iterator

from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config
from megatron_ext.rules.suggest import divisors, listed, nearest_multiples, use

_EXCHANGES = ("p2p", "all_gather", "a2a")


def exchange_of_keys_is_known(config: Config, facts: Facts) -> Iterator[str]:
    """Require that --cp-comm-type names ways of exchanging keys that exist."""
    for exchange in sorted(set(config.layout.cp_comm_type) - set(_EXCHANGES)):
        yield f"--cp-comm-type {exchange} is not one of {', '.join(_EXCHANGES)}; use --cp-comm-type p2p"


def every_layer_has_its_exchange(config: Config, facts: Facts) -> Iterator[str]:
    """Require one value of --cp-comm-type, or one for each layer."""
    kinds, layers = config.layout.cp_comm_type, config.model.num_layers
    if len(kinds) != 1 and len(kinds) != layers:
        yield (
            f"--cp-comm-type names {len(kinds)} exchanges, but it takes one for all layers or one for each of "
            f"--num-layers {layers}; use --cp-comm-type p2p"
        )


def context_chunks_are_equal(config: Config, facts: Facts) -> Iterator[str]:
    """Require that a sample divides into equal chunks, two for each context-parallel rank."""
    layout, length = config.layout, config.model.seq_length
    size, tensor = layout.context_parallel_size, layout.tensor_model_parallel_size
    if not positive(size, tensor, length) or size == 1:
        return
    # Two chunks a rank, and under sequence parallelism a tensor-parallel rank's part of both.
    unit = math.lcm(2 * size, size * tensor) if layout.sequence_parallel else 2 * size
    if length % unit:
        parts = f"2 x --context-parallel-size {size}"
        if layout.sequence_parallel:
            parts = f"{parts} chunks, or its part not by --tensor-model-parallel-size {tensor} (--sequence-parallel)"
        yield (
            f"--seq-length {length} is not divisible by {parts}; "
            f"use --seq-length {listed(nearest_multiples(length, unit))}"
        )


def heads_divide_over_context_ranks(config: Config, facts: Facts) -> Iterator[str]:
    """Require for a2a that the heads divide over the context-parallel ranks."""
    layout, model = config.layout, config.model
    size, tensor = layout.context_parallel_size, layout.tensor_model_parallel_size
    numbers = model.key_value_heads
    if "a2a" not in layout.cp_comm_type or not positive(size, tensor, *numbers.values(), model.num_attention_heads):
        return
    for kind, number in numbers.items():
        if size == 1 or number % (size * tensor) == 0:
            continue
        groups = math.gcd(*numbers.values())
        others = tensor * layout.pipeline_model_parallel_size
        working = [
            n
            for n in (divisors(groups // tensor) if groups % tensor == 0 else [])
            if n > 1 and layout.world_size % max(n * others, 1) == 0
        ]
        # Of the other exchanges none has dropout.
        dropout = " --attention-dropout 0" if model.attention_dropout > 0.0 else ""
        yield (
            f"--cp-comm-type a2a gives every rank whole key and value heads, but {kind} {number} is not divisible by "
            f"--context-parallel-size {size} x --tensor-model-parallel-size {tensor}; use --cp-comm-type "
            f"{'all_gather' if model.num_query_groups_local else 'p2p or all_gather'}{dropout}"
            f"{', or ' + use('--context-parallel-size', working).removeprefix('use ') if working else ''}"
        )


def documents_need_all_keys(config: Config, facts: Facts) -> Iterator[str]:
    """Require an exchange that shows all keys where documents are kept apart."""
    layout, kinds = config.layout, config.layout.cp_comm_type
    if not config.data.reset_attention_mask or layout.context_parallel_size <= 1:
        return
    flags = f"--context-parallel-size {layout.context_parallel_size} --cp-comm-type {' '.join(kinds)}"
    if "p2p" in kinds:
        yield (
            f"--reset-attention-mask needs all keys of a document at once, which the ring of {flags} never has; "
            f"use --cp-comm-type all_gather"
        )
    elif len(set(kinds)) > 1:
        yield (
            f"--reset-attention-mask finds the documents for one exchange, not for several ({flags}); "
            f"use --cp-comm-type all_gather"
        )


RULES = (
    exchange_of_keys_is_known,
    every_layer_has_its_exchange,
    context_chunks_are_equal,
    heads_divide_over_context_ranks,
    documents_need_all_keys,
)
