"""Rules about the ranks: how they are divided, and samples between context-parallel ones or into documents."""

import math
from collections.abc import Iterator

from megatron_ext.config.derived.optimizers import run_by, traits_of
from megatron_ext.config.derived.overlapped_products import conflicts
from megatron_ext.config.resolve import Facts, positive, runs_on_cpu
from megatron_ext.config.schema import Config
from megatron_ext.registry import brought
from megatron_ext.rules.reads import all_read_the_layout, reads
from megatron_ext.rules.suggest import divisors, listed, nearest_multiples, pipeline_sizes, tensor_sizes, use


def ranks_are_those_of_the_launch(config: Config, facts: Facts) -> Iterator[str]:
    """Require that --world-size, where given, is the number of ranks started."""
    ranks, launched = config.layout.world_size, facts.world_size
    if launched is not None and ranks != launched:
        yield (
            f"--world-size {ranks}, but {launched} ranks were started; leave --world-size out, start {ranks} ranks, "
            f"or add --dry-run to check the layout alone"
        )


def world_is_a_multiple_of_the_model(config: Config, facts: Facts) -> Iterator[str]:
    """Require a world size that is a multiple of the model-parallel size."""
    layout = config.layout
    world, tensor, stages = layout.world_size, layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    context, need = layout.context_parallel_size, layout.model_parallel_size
    if not positive(world, tensor, context, stages) or world % need == 0:
        return
    fixes = [f"start {listed(nearest_multiples(world, need))} ranks"]
    fixes += [fix for fix in (use("--tensor-model-parallel-size", tensor_sizes(config)),) if fix]
    fixes += [fix for fix in (use("--pipeline-model-parallel-size", pipeline_sizes(config)),) if fix]
    yield (
        f"world size {world} is not a multiple of --tensor-model-parallel-size {tensor} x "
        f"{f'--context-parallel-size {context} x ' if context > 1 else ''}"
        f"--pipeline-model-parallel-size {stages} = {need}; {', or '.join(fixes)}"
    )


def sequence_divides_by_tensor_size(config: Config, facts: Facts) -> Iterator[str]:
    """Require a sequence that divides over the tensor-parallel ranks for --sequence-parallel."""
    layout, length = config.layout, config.model.seq_length
    size = layout.tensor_model_parallel_size
    if layout.sequence_parallel and positive(size, length) and length % size:
        yield (
            f"--sequence-parallel: --seq-length {length} is not divisible by --tensor-model-parallel-size {size}; "
            f"use --seq-length {listed(nearest_multiples(length, size))}"
        )


@reads("recomputation")
def kept_gathers_are_those_of_plain_layers(config: Config, facts: Facts) -> Iterator[str]:
    """Require --sequence-parallel for --sequence-parallel-keep-gathered, and products that can be given the whole
    input."""
    layout, training = config.layout, config.training
    if not layout.sequence_parallel_keep_gathered:
        return
    if not layout.sequence_parallel:
        yield "--sequence-parallel-keep-gathered needs --sequence-parallel; add --sequence-parallel"
    others = {
        f"--recompute-granularity {training.recompute_granularity}": training.recompute_granularity is not None,
        "--gradient-accumulation-fusion": training.gradient_accumulation_fusion,
        **{flag: True for formats in brought("product_formats") if (flag := formats.asked(config))},
        "--torch-compile": training.torch_compile,
        "--transformer-impl transformer_engine": config.model.transformer_impl == "transformer_engine",
    }
    for flag in (flag for flag, is_on in others.items() if is_on):
        yield f"--sequence-parallel-keep-gathered does not work with {flag}; leave one of them out"


def overlapped_products_are_those_of_plain_layers(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse --tp-comm-overlap with flags of ours whose products are others."""
    for flag in conflicts(config) if config.layout.tp_comm_overlap else ():
        yield f"--tp-comm-overlap does not work with {flag}, which has products of its own; leave one of them out"


def parameter_gathering_needs_the_distributed_optimizer(config: Config, facts: Facts) -> Iterator[str]:
    """Require for --overlap-param-gather the distributed optimizer and --overlap-grad-reduce."""
    layout = config.layout
    if not layout.overlap_param_gather:
        return
    needs = [("--use-distributed-optimizer", layout.use_distributed_optimizer)]
    needs.append(("--overlap-grad-reduce", layout.overlap_grad_reduce))
    missing = [flag for flag, is_on in needs if not is_on]
    if missing:
        yield f"--overlap-param-gather needs {' and '.join(missing)}; add {' '.join(missing)}"


def distributed_optimizer_shards_the_state(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse the distributed optimizer with an optimizer whose state it cannot shard."""
    able, traits = run_by("use_distributed_optimizer"), traits_of(config.optimizer)
    if config.layout.use_distributed_optimizer and "use_distributed_optimizer" not in traits.schemes:
        whose = " or ".join(f"{other.title}'s" for other in able)
        yield (
            f"--use-distributed-optimizer shards {whose} state, not that of --optimizer {traits.name}; "
            f"use --optimizer {listed(other.name for other in able)}"
        )


def device_is_there(config: Config, facts: Facts) -> Iterator[str]:
    """Require the device that --device names."""
    device, backend = config.layout.device, config.layout.distributed_backend
    if device == "cuda" and not facts.cuda_available:
        yield "--device cuda, but this machine shows no NVIDIA GPU; use --device cpu"
        return
    on_cpu = runs_on_cpu(config, facts)
    if backend == "nccl" and on_cpu:
        yield (
            f"--distributed-backend nccl works on GPUs alone, but --device is {device} and there is none; "
            f"use --distributed-backend gloo"
        )
    if backend == "gloo" and not on_cpu:
        yield (
            f"--distributed-backend gloo serves CPU processes, but --device is {device} and there is a GPU; "
            f"use --distributed-backend nccl, or --device cpu"
        )


def timeout_is_a_time(config: Config, facts: Facts) -> Iterator[str]:
    """Require a positive timeout."""
    minutes = config.layout.distributed_timeout_minutes
    if not math.isfinite(minutes) or minutes <= 0:
        yield f"--distributed-timeout-minutes {minutes:g} is not above 0; use --distributed-timeout-minutes 10"


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


RULES = all_read_the_layout(
    (
        ranks_are_those_of_the_launch,
        world_is_a_multiple_of_the_model,
        sequence_divides_by_tensor_size,
        kept_gathers_are_those_of_plain_layers,
        overlapped_products_are_those_of_plain_layers,
        parameter_gathering_needs_the_distributed_optimizer,
        distributed_optimizer_shards_the_state,
        device_is_there,
        timeout_is_a_time,
        exchange_of_keys_is_known,
        every_layer_has_its_exchange,
        context_chunks_are_equal,
        heads_divide_over_context_ranks,
        documents_need_all_keys,
    )
)
