"""Rules about what the data-parallel ranks divide among themselves."""

import math
from collections.abc import Iterator

from megatron_ext.config.derived.optimizers import run_by, traits_of
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config
from megatron_ext.rules.suggest import divisors, listed


def fsdp2_is_the_only_sharding(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse other sharding together with FSDP2."""
    layout = config.layout
    if not layout.use_torch_fsdp2:
        for flag, is_on in (
            ("--torch-fsdp2-no-reshard-after-forward", layout.torch_fsdp2_no_reshard_after_forward),
            ("--torch-fsdp2-cpu-offload", layout.torch_fsdp2_cpu_offload),
        ):
            if is_on:
                yield f"{flag} belongs to --use-torch-fsdp2; add that, or leave it out"
        return
    if layout.torch_fsdp2_cpu_offload and config.optimizer.optimizer_cpu_offload:
        yield (
            "--torch-fsdp2-cpu-offload keeps the optimizer's state where the weights are, in host memory, and "
            "--optimizer-cpu-offload would copy it there; leave --optimizer-cpu-offload out"
        )
    if layout.use_distributed_optimizer:
        yield (
            "--use-torch-fsdp2 shards the optimizer's state already, and --use-distributed-optimizer would shard it "
            "again; keep one of them"
        )
    if layout.ddp_bucket_size is not None:
        yield "--use-torch-fsdp2 gathers and reduces layer by layer, not in buckets; leave --ddp-bucket-size out"


def fsdp2_runs_whole_models_in_bf16_or_fp32(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse what FSDP2 does not go with."""
    layout = config.layout
    if not layout.use_torch_fsdp2:
        return
    stages = layout.pipeline_model_parallel_size
    if stages > 1:
        yield (
            f"--use-torch-fsdp2 with --pipeline-model-parallel-size {stages} would gather a stage's weights anew for "
            "every microbatch in flight; use --pipeline-model-parallel-size 1, or --use-distributed-optimizer instead "
            "of --use-torch-fsdp2"
        )
    if config.model.num_experts is not None:
        yield (
            f"--use-torch-fsdp2 with --num-experts {config.model.num_experts}: experts are divided over other ranks "
            "than the rest, and FSDP2 has one division; use --use-distributed-optimizer instead of --use-torch-fsdp2"
        )
    if config.training.fp16:
        yield (
            "--use-torch-fsdp2 has no loss scaling, which --fp16 needs; use --bf16 instead of --fp16, or "
            "--use-megatron-fsdp instead of --use-torch-fsdp2"
        )


def sharded_weights_have_no_replicas(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse comparing data-parallel replicas where the weights are sharded."""
    interval = config.training.check_weight_hash_across_dp_replicas_interval
    if not interval:
        return
    for flag in config.layout.flags_that_divide_weights:
        yield (
            f"--check-weight-hash-across-dp-replicas-interval {interval} compares whole replicas, and {flag} "
            "divides every weight; use --check-weight-hash-across-dp-replicas-interval 0"
        )


def megatron_fsdp_is_the_only_sharding(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse other sharding together with Megatron-FSDP."""
    layout = config.layout
    if not layout.use_megatron_fsdp:
        if layout.data_parallel_sharding_strategy is not None:
            yield (
                f"--data-parallel-sharding-strategy {layout.data_parallel_sharding_strategy} belongs to "
                "--use-megatron-fsdp; add that, or leave it out"
            )
        return
    if layout.use_torch_fsdp2:
        yield (
            "--use-megatron-fsdp divides what --data-parallel-sharding-strategy says, and --use-torch-fsdp2 would "
            "divide it again; keep one of them"
        )


def megatron_fsdp_runs_one_stage_on_the_device(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse what Megatron-FSDP does not go with."""
    layout = config.layout
    if not layout.use_megatron_fsdp:
        return
    stages = layout.pipeline_model_parallel_size
    if stages > 1:
        yield (
            f"--use-megatron-fsdp with --pipeline-model-parallel-size {stages}: megatron-core's FSDP takes all ranks "
            "for data- and tensor-parallel ones, and knows no stages; use --pipeline-model-parallel-size 1, or "
            "--use-distributed-optimizer instead of --use-megatron-fsdp"
        )
    able, traits = run_by("use_megatron_fsdp"), traits_of(config.optimizer)
    # FSDP2 has one division of all weights, and experts another.
    instead = "--use-torch-fsdp2" if config.model.num_experts is None else "--use-distributed-optimizer"
    if "use_megatron_fsdp" not in traits.schemes:
        yield (
            f"--use-megatron-fsdp with --optimizer {traits.name}: megatron-core's sharded optimizer knows "
            f"{' and '.join(other.title for other in able)} alone; use --optimizer "
            f"{listed(other.name for other in able)}, or {instead} instead of --use-megatron-fsdp"
        )
    if config.optimizer.optimizer_cpu_offload:
        yield (
            "--use-megatron-fsdp with --optimizer-cpu-offload: the fp32 masters lie in one buffer, of which no part "
            f"can leave the device by itself; use {instead} instead of --use-megatron-fsdp"
        )
    if config.model.num_experts is not None and layout.data_parallel_sharding_strategy == "no_shard":
        yield (
            f"--data-parallel-sharding-strategy no_shard with --num-experts {config.model.num_experts}: the gradients "
            "of experts are no replicas where those of the rest are, and there is one norm for both; use "
            "--data-parallel-sharding-strategy optim, or leave --use-megatron-fsdp and "
            "--data-parallel-sharding-strategy out"
        )


def copies_are_divided_by_megatron_fsdp(config: Config, facts: Facts) -> Iterator[str]:
    """Require Megatron-FSDP for --outer-dp-sharding-strategy."""
    layout = config.layout
    strategy = layout.outer_dp_sharding_strategy
    if strategy == "no_shard":
        return
    setting = f"--outer-dp-sharding-strategy {strategy}"
    if not layout.use_megatron_fsdp:
        yield f"{setting} belongs to --use-megatron-fsdp; add that, or leave it out"
        return
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
    if not (layout.use_distributed_optimizer or layout.use_torch_fsdp2 or layout.use_megatron_fsdp):
        yield (
            f"--num-distributed-optimizer-instances {instances} copies sharded state, and nothing is sharded; add "
            "--use-distributed-optimizer, --use-torch-fsdp2 or --use-megatron-fsdp"
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


RULES = (
    fsdp2_is_the_only_sharding,
    fsdp2_runs_whole_models_in_bf16_or_fp32,
    sharded_weights_have_no_replicas,
    megatron_fsdp_is_the_only_sharding,
    megatron_fsdp_runs_one_stage_on_the_device,
    copies_are_divided_by_megatron_fsdp,
    optimizer_instances_divide_the_ranks,
)

# Those that ask which kinds of parallelism there are, but not how many ranks each has.
RULES_OF_KINDS = frozenset(RULES) - {optimizer_instances_divide_the_ranks}
