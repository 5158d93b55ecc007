"""Rules about batches, the length of the run, precision, recomputation and offloading."""

import re
from collections.abc import Iterator

from megatron_ext.config.derived.batch_size import evaluation_batch, read_schedule
from megatron_ext.config.derived.optimizers import OPTIMIZERS, has_short_averages, traits_of
from megatron_ext.config.derived.pipeline_split import layer_counts
from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.resolve import Facts, positive
from megatron_ext.config.schema import Config
from megatron_ext.parts.kinds import attention_is_replaced
from megatron_ext.rules.pipeline_rules import split_is_right
from megatron_ext.rules.reads import reads
from megatron_ext.rules.suggest import divisors, listed, nearest_multiples

_MOST_PHASES = 10_000  # of a batch ramp-up: each is counted by itself

RECOMPUTED_PARTS = ("core_attn", "mlp", "moe", "layernorm")


def one_length(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse a run whose length is given both in iterations and in samples."""
    iters, samples = config.training.train_iters, config.training.train_samples
    if iters is None and samples is None:
        yield "the length of the run is missing: give --train-iters (optimizer steps) or --train-samples"
    elif iters is not None and samples is not None:
        yield f"--train-iters {iters} and --train-samples {samples} both give the length of the run; keep one of them"


@reads("micro batch")
def global_batch_divides(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the global batch divides into microbatches of the data-parallel ranks."""
    batch, samples_at_once = config.training.global_batch_size, _samples_at_once(config)
    if config.training.step_batch_size_schedule is not None:
        return  # which says it of every batch on the way
    if samples_at_once and positive(batch) and batch % samples_at_once:
        yield (
            f"--global-batch-size {batch} is not divisible by {_at_once_text(config)}; "
            f"use --global-batch-size {listed(nearest_multiples(batch, samples_at_once))}"
        )


@reads("micro batch")
def rampup_is_well_formed(config: Config, facts: Facts) -> Iterator[str]:
    """Require a batch ramp-up that can be carried out."""
    rampup, full = config.training.rampup_batch_size, config.training.global_batch_size
    if rampup is None:
        return
    typed = "--rampup-batch-size " + " ".join(map(str, rampup))
    if len(rampup) != 3 or not positive(*rampup):
        yield f"{typed} must be three positive integers: start batch, increment, samples; for example 8 8 1000"
        return
    start, increment, _ = rampup
    # Interleaving needs whole rounds of microbatches at every batch size on the way.
    rounds = _microbatches_per_round(config)
    at_once = (_samples_at_once(config) or 1) * rounds
    if positive(full) and (full - start) // increment > _MOST_PHASES:
        least = -(-(full - start) // _MOST_PHASES)
        working = [n for n in divisors(full - start) if n >= least and n % at_once == 0] or [full - start]
        yield (
            f"{typed} grows to --global-batch-size {full} in {(full - start) // increment} phases, more than "
            f"{_MOST_PHASES}; use an increment of {working[0]}"
        )
        return
    if positive(full) and start >= full:
        yield f"{typed} starts at {start}, not below --global-batch-size {full}; use a smaller start, or leave it out"
    elif positive(full) and (full - start) % increment:
        working = [n for n in divisors(full - start) if n % at_once == 0]
        fix = f"use an increment of {listed(working[:4])}" if working else f"use a start of {at_once}"
        yield (
            f"{typed} does not reach --global-batch-size {full}: {full} - {start} = {full - start} is not divisible "
            f"by the increment {increment}; {fix}"
        )
    if start % at_once or increment % at_once:
        yield (
            f"{typed}: start {start} and increment {increment} must be multiples of {_at_once_text(config, rounds)}; "
            f"use multiples of {at_once}, for example {at_once} {at_once} {rampup[2]}"
        )


@reads("micro batch")
def schedule_of_batches_is_well_formed(config: Config, facts: Facts) -> Iterator[str]:
    """Require a --step-batch-size-schedule that can be carried out, and that is the only thing that sets the batch."""
    training, text, length = config.training, config.training.step_batch_size_schedule, config.model.seq_length
    if text is None or not positive(length):
        return
    typed = f"--step-batch-size-schedule {text!r}"
    try:
        sizes = [size for _, size in read_schedule(text, length)]
    except ValueError as error:
        example = "--step-batch-size-schedule '0:8 250B:16'"
        yield f"{typed}: {error}; give rising tokens with their samples, for example {example}"
        return
    if training.rampup_batch_size is not None:
        yield f"{typed} and --rampup-batch-size both say how the batch grows; keep one of them"
    if training.global_batch_size != sizes[-1]:
        yield (
            f"{typed} ends with {sizes[-1]}, but --global-batch-size is {training.global_batch_size}; "
            "leave --global-batch-size out"
        )
    rounds = _microbatches_per_round(config)
    at_once = (_samples_at_once(config) or 1) * rounds
    wrong = [size for size in sizes if size % at_once]
    if wrong:
        at_once_text = _at_once_text(config, rounds)
        whole = re.sub(r":(\d+)", lambda size: f":{-(-int(size[1]) // at_once) * at_once}", text)
        yield (
            f"{typed}: {listed(wrong)} is not divisible by {at_once_text}; use multiples of {at_once}, for example "
            f"--step-batch-size-schedule {whole!r}"
        )


@reads("micro batch")
def evaluation_batch_divides(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the global batch of an evaluation divides into its microbatches."""
    training, layout = config.training, config.layout
    if training.eval_global_batch_size is None and training.eval_micro_batch_size is None:
        return
    batch, micro = evaluation_batch(config)
    if not positive(batch, micro, layout.world_size, layout.model_parallel_size):
        return
    at_once = micro * max(layout.world_size // layout.model_parallel_size, 1)
    rounds = _microbatches_per_round(config)
    if batch % (at_once * rounds):
        yield (
            f"--eval-global-batch-size {batch} is not divisible by --eval-micro-batch-size {micro} x data-parallel size"
            f"{f' x the {rounds} microbatches of a group' if rounds > 1 else ''} = {at_once * rounds}; "
            f"use --eval-global-batch-size {listed(nearest_multiples(batch, at_once * rounds))}"
        )


def evaluation_alone_evaluates(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse --skip-train where nothing is evaluated."""
    training = config.training
    if training.skip_train and (
        training.eval_interval == 0 or (training.eval_iters == 0 and not training.full_validation)
    ):
        off = "--eval-interval 0" if training.eval_interval == 0 else "--eval-iters 0"
        yield f"--skip-train with {off} trains nothing and evaluates nothing; use --eval-interval 1 --eval-iters 100"


@reads()
def gradients_have_one_precision(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse --grad-reduce-in-bf16 together with --accumulate-allreduce-grads-in-fp32."""
    training = config.training
    if training.grad_reduce_in_bf16 and training.bf16 and training.accumulate_allreduce_grads_in_fp32:
        yield (
            "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 exclude each other; "
            "keep --accumulate-allreduce-grads-in-fp32, which is more exact, or --grad-reduce-in-bf16 alone"
        )


def short_moments_are_adams(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse moments in 16 bits of an optimizer that has none."""
    optimizer = config.optimizer
    takers = " or ".join(name for name, traits in OPTIMIZERS.items() if traits.in_16_bits)
    for flag, dtype in (
        ("--exp-avg-dtype", optimizer.exp_avg_dtype),
        ("--exp-avg-sq-dtype", optimizer.exp_avg_sq_dtype),
    ):
        if dtype != "fp32" and OPTIMIZERS[optimizer.optimizer].in_16_bits is None:
            yield (
                f"{flag} {dtype} belongs to --optimizer {takers}, but the optimizer is {optimizer.optimizer}; "
                "leave it out"
            )


def flags_belong_to_their_optimizer(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse a flag of an optimizer that updates nothing."""
    settings = config.optimizer
    read = {name for traits in traits_of(settings).each for name in traits.flags}
    for traits in OPTIMIZERS.values():
        others = [name for name in traits.flags if name not in read]
        read |= set(others)
        for option in (options_by_name()[name] for name in others):
            if (value := getattr(settings, option.name)) != option.default:
                given = option.flag if option.is_switch else f"{option.flag} {value}"
                owner, chosen = f"--optimizer {traits.name}", settings.optimizer
                yield f"{given} belongs to {owner}, but the optimizer is {chosen}; leave it out"


@reads()
def averages_are_kept_once(config: Config, facts: Facts) -> Iterator[str]:
    """Require of an optimizer that averages its weights that nothing else does: no decay, and no --ema-decay."""
    optimizer, chosen = config.optimizer, f"--optimizer {config.optimizer.optimizer}"
    if not traits_of(optimizer).averages:
        return
    if optimizer.lr_decay_style != "constant":
        yield (
            f"--lr-decay-style {optimizer.lr_decay_style} with {chosen}, whose average takes the place of a decay; use "
            "--lr-decay-style constant"
        )
    if optimizer.ema_decay:
        yield f"--ema-decay {optimizer.ema_decay:g} with {chosen}, which keeps an average of its own; leave it out"
    if optimizer.optimizer_cpu_offload:
        yield f"--optimizer-cpu-offload with {chosen}, whose average is evaluated on the device; leave it out"


def one_precision(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse --bf16 together with --fp16."""
    if config.training.bf16 and config.training.fp16:
        yield "--bf16 and --fp16 exclude each other; keep --bf16 (no loss scale needed), or --fp16 alone"


def loss_scales_are_in_order(config: Config, facts: Facts) -> Iterator[str]:
    """Require that the loss scale's bounds are in order."""
    training = config.training
    if training.loss_scale is not None and training.loss_scale <= 0:
        yield f"--loss-scale {training.loss_scale:g} is not above 0; leave it out for a dynamic scale"
    if not 0 < training.min_loss_scale <= training.initial_loss_scale:
        yield (
            f"--min-loss-scale {training.min_loss_scale:g} must be above 0 and at most --initial-loss-scale "
            f"{training.initial_loss_scale:g}; use --min-loss-scale 1"
        )


@reads("recomputation")
def recomputation_is_complete(config: Config, facts: Facts) -> Iterator[str]:
    """Require everything that a kind of recomputation needs."""
    training = config.training
    kind, method, layers = (
        training.recompute_granularity,
        training.recompute_method,
        training.recompute_num_layers,
    )
    if training.recompute_activations and kind == "full":
        yield (
            "--recompute-activations means selective, but --recompute-granularity is full; leave "
            "--recompute-activations out"
        )
    if kind == "full":
        if method is None or layers is None:
            yield (
                "--recompute-granularity full needs --recompute-method and --recompute-num-layers; "
                "add --recompute-method uniform --recompute-num-layers 1 to recompute every layer"
            )
        elif layers > 1 and split_is_right(config, facts):
            most = max(map(sum, layer_counts(config)))
            if layers > most:
                yield (
                    f"--recompute-num-layers {layers} is more than the {most} layers of a pipeline stage; "
                    f"use 1 to {most}"
                )
    elif method is not None or layers is not None:
        yield (
            "--recompute-method and --recompute-num-layers belong to --recompute-granularity full; "
            "add that, or leave them out"
        )


@reads("recomputation")
def recomputed_parts_are_known(config: Config, facts: Facts) -> Iterator[str]:
    """Require names of parts that can be recomputed."""
    training, parts = config.training, config.training.recompute_modules
    if parts is None:
        return
    typed = f"--recompute-modules {' '.join(parts)}".rstrip()
    unknown = [part for part in parts if part not in RECOMPUTED_PARTS]
    if unknown or not parts:
        what = f"{listed(unknown)} cannot be recomputed by itself here" if unknown else "no part is named"
        whole = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
        yield f"{typed}: {what}; use {listed(RECOMPUTED_PARTS)}, or {whole} instead of --recompute-modules"
    elif training.recompute_granularity != "selective":
        yield f"{typed} belongs to --recompute-granularity selective; add that, or leave it out"
    elif "layernorm" in parts and training.torch_compile:
        yield f"{typed} frees tensors that --torch-compile's code still refers to; leave one of the two out"
    elif "layernorm" in parts and config.model.transformer_impl == "transformer_engine":
        yield f"{typed}: Transformer Engine's norms are inside its linear layers; use core_attn or mlp"


def _samples_at_once(config: Config) -> int | None:
    """Return micro batch x data-parallel size, or None where either is wrong and another rule says so."""
    layout, micro = config.layout, config.training.micro_batch_size
    model_size = layout.model_parallel_size
    if not positive(micro, layout.world_size, model_size) or layout.world_size % model_size:
        return None
    return micro * (layout.world_size // model_size)


def _microbatches_per_round(config: Config) -> int:
    """Return the microbatches of one round of the schedule: with interleaving a group of microbatches, else one."""
    layout = config.layout
    return max(layout.microbatch_group_size, 1) if layout.virtual_pipeline_model_parallel_size > 1 else 1


def _at_once_text(config: Config, rounds: int = 1) -> str:
    micro, at_once = config.training.micro_batch_size, _samples_at_once(config)
    if not at_once:
        return f"--micro-batch-size {micro} x data-parallel size"
    group = " x --pipeline-model-parallel-size"
    if config.layout.microbatch_group_size_per_virtual_pipeline_stage is not None:
        group = " x --microbatch-group-size-per-virtual-pipeline-stage"
    group = f"{group} {rounds}" if rounds > 1 else ""
    return f"--micro-batch-size {micro} x data-parallel size {at_once // micro}{group} = {at_once * rounds}"


@reads()
def offloading_offloads_something(config: Config, facts: Facts) -> Iterator[str]:
    """Refuse flags of offloading that offload nothing."""
    optimizer = config.optimizer
    fraction = optimizer.optimizer_offload_fraction
    if (
        not config.layout.torch_fsdp2_cpu_offload
        and not optimizer.optimizer_cpu_offload
        and optimizer.no_pin_cpu_params
    ):
        offload = "--torch-fsdp2-cpu-offload" if config.layout.use_torch_fsdp2 else "--optimizer-cpu-offload"
        yield (
            "--no-pin-cpu-params belongs to --optimizer-cpu-offload or --torch-fsdp2-cpu-offload; add "
            f"{offload}, or leave it out"
        )
    offloads = optimizer.optimizer_cpu_offload or config.layout.torch_fsdp2_cpu_offload
    if offloads and has_short_averages(optimizer):
        flag = "--optimizer-cpu-offload" if optimizer.optimizer_cpu_offload else "--torch-fsdp2-cpu-offload"
        yield f"{flag} updates moments in fp32 on the host; leave --exp-avg-dtype and --exp-avg-sq-dtype out"
    if optimizer.optimizer_cpu_offload:
        if not 0 < fraction <= 1:
            yield (
                f"--optimizer-offload-fraction {fraction:g} is no share of the optimizer state; use 0.5, or another "
                "number above 0 and at most 1, or leave --optimizer-cpu-offload and --optimizer-offload-fraction out"
            )
        return
    for flag, is_on in (
        (f"--optimizer-offload-fraction {fraction:g}", fraction != 1),
        ("--use-torch-optimizer-for-cpu-offload", optimizer.use_torch_optimizer_for_cpu_offload),
        ("--overlap-cpu-optimizer-d2h-h2d", optimizer.overlap_cpu_optimizer_d2h_h2d),
        ("--no-pin-cpu-grads", optimizer.no_pin_cpu_grads),
    ):
        if is_on:
            yield f"{flag} belongs to --optimizer-cpu-offload; add that, or leave it out"


@reads()
def products_can_be_bounded(config: Config, facts: Facts) -> Iterator[str]:
    """Require weights for --qk-clip that make the products of queries and keys, and nothing else, and attention that
    measures these."""
    model, asked = config.model, config.optimizer
    measuring = {"--qk-clip": asked.qk_clip, "--log-max-attention-logit": config.logging.log_max_attention_logit}
    for flag in (flag for flag, on in measuring.items() if on and model.transformer_impl == "transformer_engine"):
        yield f"{flag} with --transformer-impl transformer_engine is not measured; use --transformer-impl local"
    if not asked.qk_clip:
        return
    tensor = config.layout.tensor_model_parallel_size
    grouped = not attention_is_replaced(model)
    if grouped and model.has_qkv_bias:
        fix = "leave --add-qkv-bias out" if model.add_qkv_bias else "use --disable-bias-linear"
        yield f"--qk-clip rescales weights, and not the biases that queries and keys have; {fix}"
    if asked.optimizer == "schedule_free":
        yield (
            "--qk-clip with --optimizer schedule_free: the next update makes the weights anew from two others; use "
            "--optimizer muon or adam"
        )
    for flag in ("--qk-layernorm",) * (grouped and model.qk_layernorm) + ("--qk-l2-norm",) * model.qk_l2_norm:
        yield f"--qk-clip with {flag}: no weight before the norm changes what it returns; leave --qk-clip out"
    for flag, groups in model.key_value_heads.items():
        if grouped and groups is not None and tensor > groups:
            yield (
                f"--qk-clip with --tensor-model-parallel-size {tensor} and {flag} {groups}: ranks share a group of "
                f"heads, which reach other products on each; use --tensor-model-parallel-size {groups} or less"
            )
    for flag, on in (
        ("--optimizer-cpu-offload", asked.optimizer_cpu_offload),
        ("--torch-fsdp2-cpu-offload", config.layout.torch_fsdp2_cpu_offload),
    ):
        if on:
            yield f"--qk-clip with {flag}: weights are rescaled on the device; leave {flag} out"


RULES = (
    products_can_be_bounded,
    one_length,
    global_batch_divides,
    rampup_is_well_formed,
    schedule_of_batches_is_well_formed,
    evaluation_batch_divides,
    evaluation_alone_evaluates,
    gradients_have_one_precision,
    short_moments_are_adams,
    flags_belong_to_their_optimizer,
    averages_are_kept_once,
    one_precision,
    loss_scales_are_in_order,
    recomputation_is_complete,
    recomputed_parts_are_known,
    offloading_offloads_something,
)
