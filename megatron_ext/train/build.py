"""Wire a run: groups, model, sharding scheme, optimizer, data, in this order.

Each room makes its own part of it; this file alone calls them together, and hands the results of one to the next.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext import environment, terminal
from megatron_ext.checkpoint.native.resume import Resume
from megatron_ext.config.derived.batch_size import evaluation_batch
from megatron_ext.config.derived.cuda_graphs import makes_graphs
from megatron_ext.config.derived.overlapped_products import overlaps
from megatron_ext.config.derived.pipeline_split import last_stage, splits_backward
from megatron_ext.config.parse.blend import is_url
from megatron_ext.config.schema import Config
from megatron_ext.cost.schedule import schedule_of, schedule_without_gradients
from megatron_ext.data.loader import ANOTHER_TOKENIZER, BatchLoader
from megatron_ext.data.microbatch import StageView
from megatron_ext.data.samples import BySource, SampleDataset, Samples, describe_sample
from megatron_ext.data.skipped import NOTHING, SkippedSamples, skipped_samples
from megatron_ext.device import split_backward
from megatron_ext.device.device_protocol import Device
from megatron_ext.device.kernels import GEMMS, gemm_by_ability, measured_gemm, use_gemm
from megatron_ext.model.config import transformer_config
from megatron_ext.model.gpt import build_model
from megatron_ext.model.own_layers import check_own_modules, mark_own_parameters, of_plugins_elsewhere
from megatron_ext.optim.averages import keep_averages
from megatron_ext.optim.loss_scale import share_loss_scale
from megatron_ext.optim.qk_clip import LargestScores, QKClip
from megatron_ext.parallel import groups as process_groups
from megatron_ext.parts.attention.choice import allowed_kernels, use
from megatron_ext.parts.linear.compute import overlap_communication
from megatron_ext.parts.numbers import RecordedNumbers
from megatron_ext.parts.stack import layers, numbers_of_parts
from megatron_ext.sharding.choose import sharding_of
from megatron_ext.telemetry.profiler import open_range
from megatron_ext.telemetry.timers import Timers
from megatron_ext.train.captured_passes import CapturedPasses
from megatron_ext.train.datasets import datasets_of_run, record_of_run, samples_of_run, tokenizer_of_run
from megatron_ext.train.extensions import NONE, OWN_IDS, Extensions
from megatron_ext.train.gradient_watch import GradientWatch
from megatron_ext.train.run import HeldOut, HeldOutPart, Loaders, Run
from megatron_ext.train.state import TrainState
from megatron_ext.train.table_runtime import TableRuntime


def build_run(config: Config, device: Device, resume: Resume | None = None, extensions: Extensions = NONE) -> Run:
    """Build everything that `config` describes, ready for the first step, on this rank.

    Args:
        config: the run's configuration.
        device: this rank's device.
        resume: the checkpoint that will be loaded, whose order of the samples the run goes on with.
        extensions: a user's own parts of it.
    Raises:
        DataError: a data file is present but wrong.
    """
    sharding = sharding_of(config)
    groups = process_groups.initialize(config.layout, device, from_host=sharding.lives_on_host)
    set_kernels(config, device)
    seed_dropout(config, groups)
    core = transformer_config(config, device.kind, on_meta=sharding.builds_on_meta)
    chunks = build_model(
        config,
        core,
        groups,
        on_meta=sharding.builds_on_meta,
        layer_spec=extensions.layer_spec,
        own_loss=extensions.loss,
        keeps_output_weight=sharding.keeps_output_weight,
    )
    if extensions.layer_spec is not None or of_plugins_elsewhere(chunks):
        mark_own_parameters(chunks, config, are_all_named=extensions.layer_spec is None)
        check_own_modules(chunks, config)
    if overlaps(config):
        _overlap_products(chunks, config, groups, device)
    if config.training.torch_compile:
        compile_layers(chunks)
    wrapped = sharding.shard(chunks, core, groups, device)
    optimizer = sharding.optimizer(wrapped, groups, device)
    qk_clip = None
    if config.optimizer.qk_clip:
        scores = LargestScores(wrapped, groups.dp_cp)
        with sharding.weights_in_place(wrapped):
            qk_clip = QKClip(core, scores, sharding.parts(optimizer))
    for part in sharding.parts(optimizer):
        for torch_optimizer in part.updater.torch_optimizers:
            keep_averages(torch_optimizer, config.optimizer)
    ranges = open_range(config)
    timers = Timers(config.logging.timing_log_level, device.synchronize, ranges)
    if config.logging.timing_log_level > 0 or ranges is not None:
        # The engine times its own parts; without timers it skips even the calls.
        core.timers = timers
        for part in optimizer.chained_optimizers:
            part.config.timers = timers
    loss_scale = share_loss_scale(optimizer)
    core.grad_scale_func = optimizer.scale_loss if loss_scale is None else loss_scale.scaled
    core.finalize_model_grads_func = finalize_model_grads if loss_scale is None else loss_scale.finalize
    loaders = build_loaders(config, device, groups, resume, extensions)
    schedule = schedule_of_passes(config, groups, core)
    modules = [layer.modules for layer in layers(config)]
    watch = GradientWatch(wrapped, sharding, modules, alone=config.layout.world_size == 1)
    return Run(
        config=config,
        device=device,
        groups=groups,
        p2p=P2PCommunicator(pp_group=groups.pp, config=core),
        schedule=schedule,
        transformer_config=core,
        sharding=sharding,
        chunks=wrapped,
        optimizer=optimizer,
        gradient_watch=watch,
        timers=timers,
        loaders=loaders,
        data_record=record_of_run(config, loaders.samples, resume),
        numbers=RecordedNumbers(numbers_of_parts(config), groups.dp.size(), device.torch_device),
        state=TrainState(),
        qk_clip=qk_clip,
        captured_passes=captured_passes(config, device, schedule, wrapped, watch),
    )


def schedule_of_passes(
    config: Config, groups: ProcessGroupCollection, core: TransformerConfig
) -> Callable[..., list[Any]]:
    """Return the function that runs a step's forward and backward passes: megatron-core's, or the runtime of the table
    that --pipeline-schedule names."""
    split_backward.split(splits_backward(config.layout))
    if config.layout.table is None or groups.pp.size() == 1:
        engine: Any = get_forward_backward_func(groups.pp.size(), core.virtual_pipeline_model_parallel_size)
        return engine
    schedule_for: Any = partial(schedule_of, config)
    return TableRuntime(schedule_for, partial(schedule_without_gradients, config))


def captured_passes(
    config: Config,
    device: Device,
    schedule: Callable[..., Any],
    chunks: Sequence[torch.nn.Module],
    watch: GradientWatch,
) -> CapturedPasses | None:
    """Return the object that captures a step's passes as CUDA graphs; None where the configuration makes no graphs."""
    if not makes_graphs(config):
        return None
    assert device.kind == "cuda", "resolved: CPU processes have no CUDA graphs"
    return CapturedPasses(schedule, config.training.cuda_graph_warmup_steps, chunks, watch, device.synchronize)


def compile_layers(chunks: Sequence[torch.nn.Module]) -> None:
    """Let torch.compile make each transformer layer's kernels when it first runs; names and hooks stay as they are."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, TransformerLayer):
            module.compile()


def _overlap_products(
    chunks: Sequence[torch.nn.Module], config: Config, groups: ProcessGroupCollection, device: Device
) -> None:
    """Have tensor-parallel layers multiply while they communicate, or warn why they do not. Collective."""
    lacks = device.lacks_for_overlap(groups.tp)
    for chunk in chunks if lacks is None else ():
        overlap_communication(chunk)
    if lacks is not None and groups.tp.rank() == 0 and config.layout.device != "cpu":  # which has been told already
        ranks = f"rank {environment.rank()} and its tensor-parallel ranks"
        terminal.warn(f"--tp-comm-overlap changes nothing on {ranks}: {lacks}")


def set_kernels(config: Config, device: Device) -> None:
    """Set precision and determinism of the kernels of this process, and the kernel of attention that was chosen."""
    allowed = allowed_kernels(config)
    use(allowed[0] if len(allowed) == 1 else None, device)
    name = config.training.cpu_gemm
    use_gemm(gemm_by_ability() if name == "auto" else name)  # auto: by the processor's vectors alone
    torch.backends.cuda.matmul.allow_tf32 = config.training.tf32
    torch.backends.cudnn.allow_tf32 = config.training.tf32
    in_fp32 = config.training.disable_bf16_reduced_precision_matmul
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not in_fp32
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)


def seed_dropout(config: Config, groups: ProcessGroupCollection) -> None:
    """Seed the generators that dropout draws from.

    Tensor-parallel ranks share the seed, so that replicated activations get one mask; megatron-core derives the
    seed of sharded regions from it. Every pipeline stage, data- and context-parallel rank draws its own. Weights do not
    come from these generators.
    """
    name = f"dropout:{config.training.seed}:{groups.pp.rank()}:{groups.dp.rank()}"
    if groups.cp.size() > 1:
        name += f":{groups.cp.rank()}"
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") >> 1
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(
        seed, tp_rank=groups.tp.rank(), ep_rank=groups.ep.rank(), etp_rank=groups.expt_tp.rank(), force_reset_rng=True
    )


def build_loaders(
    config: Config,
    device: Device,
    groups: ProcessGroupCollection,
    resume: Resume | None = None,
    extensions: Extensions = NONE,
) -> Loaders:
    """Return the loaders of training data and, where it is evaluated, of validation and test data."""
    training, data = config.training, config.data
    tokenizer = tokenizer_of_run(config)
    datasets = datasets_of_run(config, tokenizer, resume, extensions)
    wanted = samples_of_run(config).valid
    assert datasets.train is not None
    given = [one for one in (datasets.train, datasets.valid, datasets.test) if one is not None]
    from_store = any(is_url(source.name) for one in given for source in one.sources)

    def loader(
        dataset: SampleDataset, micro_batch_size: int, describe: Callable[[int], str], skipped: SkippedSamples = NOTHING
    ) -> BatchLoader:
        return BatchLoader(
            dataset,
            vocab_size=tokenizer.vocab_size,
            seq_length=config.model.seq_length,
            micro_batch_size=micro_batch_size,
            dp_rank=groups.dp.rank(),
            dp_size=groups.dp.size(),
            view=StageView(
                is_first_stage=groups.pp.rank() == 0,
                is_last_stage=groups.pp.rank() == last_stage(config.layout),
                cp_rank=groups.cp.rank(),
                cp_size=groups.cp.size(),
                eod=tokenizer.eod,
                restarts_positions=data.reset_position_ids,
                separates_documents=data.reset_attention_mask,
                exchanges_heads="a2a" in config.layout.cp_comm_type,
                depths=config.model.mtp_num_layers or 0,
            ),
            num_workers=data.num_workers,
            pin_memory=device.kind == "cuda",
            describe=describe,
            reads_ahead=from_store,
            skipped=skipped,
            remedy=ANOTHER_TOKENIZER if extensions.datasets is None else OWN_IDS,
        )

    def held_out(dataset: Samples | None) -> HeldOut | None:
        if dataset is None or len(dataset) == 0:
            return None
        grouped = BySource(dataset, _held_out_counts(config, dataset, wanted))
        names = training.validation_set_names
        parts = [
            HeldOutPart(source.name, names[number] if names and number < len(names) else str(number), positions)
            for number, (source, positions) in enumerate(zip(dataset.sources, grouped.ranges, strict=True))
        ]
        held_out_loader = loader(grouped, evaluation_batch(config)[1], grouped.describe)
        return HeldOut(held_out_loader, tuple(part for part in parts if part.positions))

    train, skipped = datasets.train, skipped_samples(data.skip_samples or ())
    return Loaders(
        train=loader(train, training.micro_batch_size, lambda index: describe_sample(train, index), skipped),
        samples=train,
        valid=held_out(datasets.valid),
        test=held_out(datasets.test),
        skipped=skipped,
    )


def _held_out_counts(config: Config, dataset: Samples, wanted: int) -> list[int]:
    """Return how many samples of each source an evaluation reads."""
    everything = dataset.counts(len(dataset))
    if config.training.full_validation:
        return everything
    if config.training.multiple_validation_sets:
        return [min(wanted, count) for count in everything]
    return dataset.counts(min(wanted, len(dataset)))


def with_chosen_gemm(config: Config, device: Device, resume: Resume | None) -> Config:
    """Return the configuration with --cpu-gemm auto replaced by the library that multiplies fp32 matrices on a CPU, the
    same on all ranks. Collective, where it is measured.

    The libraries round differently. A resumed run therefore keeps the library of its checkpoint, so that it goes on
    with the same bits: the choice is part of the configuration that a checkpoint holds.
    """
    training = config.training
    if device.kind != "cpu" or training.cpu_gemm != "auto" or training.params_dtype != "float32":
        return config
    saved = ((resume.saved if resume is not None else None) or {}).get("cpu_gemm")
    chosen = [saved if saved in GEMMS else measured_gemm()]
    torch.distributed.broadcast_object_list(chosen, src=0)
    return replace(config, training=replace(training, cpu_gemm=chosen[0]))
