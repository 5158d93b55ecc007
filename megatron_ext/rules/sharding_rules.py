"""Rules about the state that data-parallel ranks divide."""

import math
from collections.abc import Iterator
from dataclasses import replace

from megatron_ext.config.derived.optimizers import run_by, traits_of
from megatron_ext.config.derived.sharding import FLAGS, given_schemes
from megatron_ext.config.parse.options import flag_of, options_by_name
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config
from megatron_ext.rules.reads import all_read_the_layout, reads
from megatron_ext.rules.suggest import divisors, listed


def flags_belong_to_their_scheme(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse a flag of a scheme without the scheme's."""
    layout = vars(config.layout)
    for scheme in given_schemes({flag: not layout[flag] for flag in FLAGS}):
        for option in (options_by_name()[name] for name in scheme.own):
            if (value := layout[option.name]) != option.default:
                given = option.flag if option.is_switch else f"{option.flag} {value}"
                flag = flag_of(str(scheme.flag))
                added = replace(config, layout=replace(config.layout, **{str(scheme.flag): True}))
                fix = "leave it out" if any(scheme.cannot(added)) else "add that, or leave it out"
                yield f"{given} belongs to {flag}; {fix}"


def schemes_go_with_the_rest(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse the configurations that a sharding scheme does not work with."""
    for scheme in given_schemes(vars(config.layout)):
        yield from scheme.cannot(config)


@reads("recomputation")
def repeated_layers_are_computed_once(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse to compute a layer anew that is applied several times, where a scheme divides the gradients."""
    model, layout, training = config.model, config.layout, config.training
    if not model.mtp_use_repeated_layer or (model.mtp_num_layers or 0) < 2:
        return  # so that a search asks once for all schemes
    strategy = layout.data_parallel_sharding_strategy
    divides = layout.use_megatron_fsdp and strategy in ("optim_grads", "optim_grads_params")
    if not (layout.use_torch_fsdp2 or divides):
        return
    if training.recompute_method == "uniform":
        recomputed, instead = "--recompute-method uniform", "use --recompute-method block"
    elif divides and training.recompute_granularity == "selective":
        modules = f" --recompute-modules {' '.join(kept)}" if (kept := training.recompute_modules) else ""
        recomputed = f"--recompute-granularity selective{modules}"
        instead = f"leave {recomputed} out"
    else:
        return
    scheme = f"--data-parallel-sharding-strategy {strategy}" if divides else "--use-torch-fsdp2"
    yield (
        f"--mtp-use-repeated-layer with {scheme} and {recomputed}: weights would get a gradient each time that their "
        f"layer is computed anew, and these shards take one in a backward pass; {instead}, or leave "
        "--mtp-use-repeated-layer out"
    )


def megatron_fsdp_shards_the_state(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse Megatron-FSDP with an optimizer whose state it cannot shard."""
    able, traits = run_by("use_megatron_fsdp"), traits_of(config.optimizer)
    if config.layout.use_megatron_fsdp and "use_megatron_fsdp" not in traits.schemes:
        # FSDP2 has one division of all weights, and experts another; it scales no loss, either.
        is_able = config.model.num_experts is None and not config.training.fp16
        instead = "--use-torch-fsdp2" if is_able else "--use-distributed-optimizer"
        yield (
            f"--use-megatron-fsdp with --optimizer {traits.name}: megatron-core's sharded optimizer knows "
            f"{' and '.join(other.title for other in able)} alone; use --optimizer "
            f"{listed(other.name for other in able)}, or {instead} instead of --use-megatron-fsdp"
        )


def matrices_are_whole(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse, with an optimizer that updates whole matrices, flags that divide matrices or put them into host
    memory."""
    traits, layout = traits_of(config.optimizer), config.layout
    sizes = {name: getattr(layout, name) for name in ("tensor_model_parallel_size", "expert_tensor_parallel_size")}
    divide = [f"{flag_of(name)} {size}" for name, size in sizes.items() if (size or 1) > 1]
    given = [] if traits.puts_matrices_together else [*divide, *layout.flags_that_divide_weights]
    given += ["--optimizer-cpu-offload"] * config.optimizer.optimizer_cpu_offload
    given += ["--torch-fsdp2-cpu-offload"] * layout.torch_fsdp2_cpu_offload
    for flag in given if traits.needs_whole_matrices else ():
        yield (
            f"{flag} leaves the device without whole matrices, which {traits.title} updates; leave it out "
            "(--use-distributed-optimizer shares whole ones out among the ranks)"
        )


def copies_are_divided_by_megatron_fsdp(config: Config, facts: Facts) -> Iterator[str]:
    """Require weights that are divided, and copies, for --outer-dp-sharding-strategy."""
    layout = config.layout
    strategy = layout.outer_dp_sharding_strategy
    if strategy == "no_shard" or not layout.use_megatron_fsdp:
        return
    setting = f"--outer-dp-sharding-strategy {strategy}"
    if layout.data_parallel_sharding_strategy != "optim_grads_params":
        yield (
            f"{setting} with --data-parallel-sharding-strategy {layout.data_parallel_sharding_strategy}: megatron-core "
            "divides the copies of what is wholly divided inside of each; use --data-parallel-sharding-strategy "
            "optim_grads_params"
        )
    if layout.num_distributed_optimizer_instances == 1:
        yield (
            f"{setting} divides the optimizer's state over copies, and --num-distributed-optimizer-instances is 1; use "
            "--num-distributed-optimizer-instances 2 or more, or --outer-dp-sharding-strategy no_shard"
        )


def optimizer_instances_divide_the_ranks(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the optimizer instances divide the data-parallel ranks."""
    layout = config.layout
    instances = layout.num_distributed_optimizer_instances
    if instances == 1:
        return
    if instances < 1:
        yield f"--num-distributed-optimizer-instances {instances} is not above 0; use 1"
        return
    if not given_schemes(vars(layout)):
        yield (
            f"--num-distributed-optimizer-instances {instances} copies sharded state, and nothing is sharded; add "
            f"{listed(map(flag_of, FLAGS))}"
        )
    if not positive(layout.world_size, layout.model_parallel_size) or layout.world_size % layout.model_parallel_size:
        return  # another rule names that
    ranks = layout.data_parallel_size
    if ranks % instances:
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the data-parallel size {ranks}; "
            f"use {listed(divisors(ranks))}"
        )
    elif config.model.num_experts is None or not positive(layout.expert_model_parallel_size, layout.expert_tensor_size):
        return
    elif layout.expert_data_parallel_size % instances:
        experts = layout.expert_data_parallel_size
        yield (
            f"--num-distributed-optimizer-instances {instances} does not divide the {experts} ranks that hold the same "
            f"experts (--expert-model-parallel-size {layout.expert_model_parallel_size}); use "
            f"{listed(divisors(math.gcd(ranks, experts)))}"
        )


RULES = all_read_the_layout(
    (
        flags_belong_to_their_scheme,
        schemes_go_with_the_rest,
        repeated_layers_are_computed_once,
        megatron_fsdp_shards_the_state,
        matrices_are_whole,
        copies_are_divided_by_megatron_fsdp,
        optimizer_instances_divide_the_ranks,
    )
)

# Those that ask which kinds of parallelism there are, but not how many ranks each has.
RULES_OF_KINDS = frozenset(RULES) - {optimizer_instances_divide_the_ranks}
