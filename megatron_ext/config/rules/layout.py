"""Rules about how the ranks share the work."""

import math
from collections.abc import Iterator

from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.rules.suggest import divisors, listed, nearest_multiples, pipeline_sizes, tensor_sizes, use
from megatron_ext.config.schema import Config


def ranks_are_those_of_the_launch(config: Config, facts: Facts) -> Iterator[str]:
    given, launched = config.layout.world_size, facts.world_size
    if launched is not None and given != launched:
        yield (
            f"--world-size {given}, but {launched} ranks were started; leave --world-size out, start {given} ranks, "
            f"or add --dry-run to check the layout alone"
        )


def world_is_a_multiple_of_the_model(config: Config, facts: Facts) -> Iterator[str]:
    layout = config.layout
    world, tensor, stages = layout.world_size, layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    if not positive(world, tensor, stages) or world % (tensor * stages) == 0:
        return
    need = tensor * stages
    fixes = [f"start {listed(nearest_multiples(world, need))} ranks"]
    fixes += [fix for fix in (use("--tensor-model-parallel-size", tensor_sizes(config)),) if fix]
    fixes += [fix for fix in (use("--pipeline-model-parallel-size", pipeline_sizes(config)),) if fix]
    yield (
        f"world size {world} is not a multiple of --tensor-model-parallel-size {tensor} x "
        f"--pipeline-model-parallel-size {stages} = {need}; {', or '.join(fixes)}"
    )


def layers_divide_over_stages(config: Config, facts: Facts) -> Iterator[str]:
    layers, stages = config.model.num_layers, config.layout.pipeline_model_parallel_size
    if positive(layers, stages) and layers % stages:
        fixes = [f"use --num-layers {listed(nearest_multiples(layers, stages))}"]
        sizes = pipeline_sizes(config)
        if sizes:
            fixes.append(f"--pipeline-model-parallel-size {listed(sizes)}")
        yield (
            f"--num-layers {layers} is not divisible by --pipeline-model-parallel-size {stages}; {', or '.join(fixes)}"
        )


def layers_divide_over_chunks(config: Config, facts: Facts) -> Iterator[str]:
    layout, layers = config.layout, config.model.num_layers
    stages = layout.pipeline_model_parallel_size
    chunks = layout.num_virtual_stages_per_pipeline_rank or 0
    chunk_size = layout.num_layers_per_virtual_pipeline_stage or 0
    if not positive(layers, stages) or layers % stages:
        return
    per_stage = layers // stages
    working = listed(divisors(per_stage))
    if positive(chunks) and per_stage % chunks:
        yield (
            f"--num-virtual-stages-per-pipeline-rank {chunks} does not divide the {per_stage} layers of a stage "
            f"(--num-layers {layers} / --pipeline-model-parallel-size {stages}); "
            f"use --num-virtual-stages-per-pipeline-rank {working}"
        )
    elif positive(chunk_size) and per_stage % chunk_size:
        yield (
            f"--num-layers-per-virtual-pipeline-stage {chunk_size} does not divide the {per_stage} layers of a stage "
            f"(--num-layers {layers} / --pipeline-model-parallel-size {stages}); "
            f"use --num-layers-per-virtual-pipeline-stage {working}"
        )
    elif positive(chunks, chunk_size) and chunks * chunk_size != per_stage:
        yield (
            f"--num-virtual-stages-per-pipeline-rank {chunks} and --num-layers-per-virtual-pipeline-stage {chunk_size} "
            f"disagree: a stage has {per_stage} layers; give one of them"
        )


def interleaving_needs_stages(config: Config, facts: Facts) -> Iterator[str]:
    layout = config.layout
    stages = layout.pipeline_model_parallel_size
    if layout.virtual_pipeline_model_parallel_size == 1 or stages < 1:
        return
    flag = f"--num-virtual-stages-per-pipeline-rank {layout.virtual_pipeline_model_parallel_size}"
    if layout.num_layers_per_virtual_pipeline_stage is not None:
        flag += f" (--num-layers-per-virtual-pipeline-stage {layout.num_layers_per_virtual_pipeline_stage})"
    if stages == 1:
        yield (
            f"{flag} interleaves pipeline stages, but --pipeline-model-parallel-size is 1; "
            f"leave the virtual stages out{_interleaved_layout(config)}"
        )
    elif stages == 2 and layout.no_overlap_p2p_communication:
        yield (
            f"{flag} with --pipeline-model-parallel-size 2 cannot run under --no-overlap-p2p-communication: the two "
            f"ranks would exchange several tensors in one batch; leave --no-overlap-p2p-communication out"
        )


def _interleaved_layout(config: Config) -> str:
    """A pipeline size that interleaves with the virtual stages given, and a batch in whole rounds for it."""
    layout, training = config.layout, config.training
    sizes = [size for size in pipeline_sizes(config) if size > 1]
    if not sizes or not positive(training.micro_batch_size, layout.tensor_model_parallel_size):
        return ""
    stages = sizes[0]
    per_round = training.micro_batch_size * stages * (layout.world_size // (layout.tensor_model_parallel_size * stages))
    rounds = -(-(training.global_batch_size or 1) // per_round)
    return f", or use --pipeline-model-parallel-size {stages} --global-batch-size {rounds * per_round}"


def interleaving_needs_rounds_of_microbatches(config: Config, facts: Facts) -> Iterator[str]:
    layout, training = config.layout, config.training
    stages, world = layout.pipeline_model_parallel_size, layout.world_size
    model_size = layout.tensor_model_parallel_size * stages
    batch, micro = training.global_batch_size, training.micro_batch_size
    if layout.virtual_pipeline_model_parallel_size == 1 or stages < 2 or not positive(batch, micro, world, model_size):
        return
    if world % model_size or batch % (micro * (world // model_size)):
        return  # other rules name that
    data_size = world // model_size
    microbatches = batch // (micro * data_size)
    if microbatches % stages:
        yield (
            f"interleaving needs a number of microbatches that --pipeline-model-parallel-size {stages} divides, but "
            f"--global-batch-size {batch} / (--micro-batch-size {micro} x data-parallel size {data_size}) = "
            f"{microbatches}; use --global-batch-size {listed(nearest_multiples(batch, stages * micro * data_size))}"
        )


def sequence_parallel_needs_tensor_parallel(config: Config, facts: Facts) -> Iterator[str]:
    layout, length = config.layout, config.model.seq_length
    size = layout.tensor_model_parallel_size
    if not layout.sequence_parallel or size < 1:
        return
    if size == 1:
        working = [s for s in tensor_sizes(config) if s > 1]
        fix = f"{use('--tensor-model-parallel-size', working)}, or " if working else ""
        yield (
            f"--sequence-parallel splits the sequence between tensor-parallel ranks, but --tensor-model-parallel-size "
            f"is 1; {fix}leave --sequence-parallel out"
        )
    elif positive(length) and length % size:
        yield (
            f"--sequence-parallel: --seq-length {length} is not divisible by --tensor-model-parallel-size {size}; "
            f"use --seq-length {listed(nearest_multiples(length, size))}"
        )


def parameter_gathering_needs_the_distributed_optimizer(config: Config, facts: Facts) -> Iterator[str]:
    layout = config.layout
    if not layout.overlap_param_gather:
        return
    needs = [("--use-distributed-optimizer", layout.use_distributed_optimizer)]
    needs.append(("--overlap-grad-reduce", layout.overlap_grad_reduce))
    missing = [flag for flag, given in needs if not given]
    if missing:
        yield f"--overlap-param-gather needs {' and '.join(missing)}; add {' '.join(missing)}"


def distributed_optimizer_shards_adam(config: Config, facts: Facts) -> Iterator[str]:
    rule = config.optimizer.optimizer
    if config.layout.use_distributed_optimizer and rule != "adam":
        yield f"--use-distributed-optimizer shards Adam's state, not that of --optimizer {rule}; use --optimizer adam"


def device_is_there(config: Config, facts: Facts) -> Iterator[str]:
    device, backend = config.layout.device, config.layout.distributed_backend
    if device == "cuda" and not facts.cuda_available:
        yield "--device cuda, but this machine shows no NVIDIA GPU; use --device cpu"
        return
    on_cpu = device == "cpu" or (device == "auto" and not facts.cuda_available)
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
    minutes = config.layout.distributed_timeout_minutes
    if not math.isfinite(minutes) or minutes <= 0:
        yield f"--distributed-timeout-minutes {minutes:g} is not above 0; use --distributed-timeout-minutes 10"


RULES = (
    ranks_are_those_of_the_launch,
    world_is_a_multiple_of_the_model,
    layers_divide_over_stages,
    layers_divide_over_chunks,
    interleaving_needs_stages,
    interleaving_needs_rounds_of_microbatches,
    sequence_parallel_needs_tensor_parallel,
    parameter_gathering_needs_the_distributed_optimizer,
    distributed_optimizer_shards_adam,
    device_is_there,
    timeout_is_a_time,
)
