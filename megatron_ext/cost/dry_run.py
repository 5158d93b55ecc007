"""Makes the text that `--dry-run` prints: the layout rank by rank, and the sizes of model, batch and run.

Its last lines say whether the layout fits in a device's memory:

    lines, fits = verdict(config, device_memory_gb=80)

The bytes come from cost/memory.py: formulas, which leave out the CUDA context, NCCL's buffers and the allocator's
fragmentation; 8% of the memory are left for these.
"""

from collections import Counter
from collections.abc import Sequence

from megatron_ext.config.derived.batch_size import batch_phases, num_microbatches, training_steps
from megatron_ext.config.derived.rank_order import (
    axis_sizes,
    chunk_layers,
    coordinates,
    expert_axis_sizes,
    expert_coordinates,
    rank_of,
)
from megatron_ext.config.derived.sharding import ZERO_1
from megatron_ext.config.schema import Config
from megatron_ext.cost.fitting_flags import fitting_flags
from megatron_ext.cost.flops import (
    active_parameters,
    flops_per_token,
    parameters_without_embeddings,
)
from megatron_ext.cost.hardware import TABLE
from megatron_ext.cost.memory import estimate
from megatron_ext.cost.schedule import TableSchedule, most_held, schedule_of
from megatron_ext.cost.state_bytes import state_bytes
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.catalogue import count, count_per_rank, vocabulary_padding
from megatron_ext.parts.experts.describe import Experts
from megatron_ext.parts.stack import layers
from megatron_ext.registry import brought

_MOST_RANKS_LISTED = 64


def describe(config: Config, most_lines: int | None = None, columns: int | None = None) -> str:
    """Return the report on a validated configuration.

    Args:
        most_lines: lines of the screen that it has to fit, if any: where it does not, its sections are not set apart,
            and the tables of ranks and of stages have their first rows and their last.
        columns: the screen's, in which a longer line takes several; None where none does.
    """
    stages, ranks = _stages(config), _ranks(config)
    others = [_formula(config), _model(config), _batch(config), _run(config)]
    rest = sum(height(lines, columns) for lines in others)
    apart = most_lines is None or rest + sum(height(table, columns) for table in (stages, ranks)) + 5 <= most_lines
    if most_lines is not None and not apart:
        ranks = _shortened(ranks, most_lines - rest - height(stages, columns), columns)
        stages = _shortened(stages, most_lines - rest - height(ranks, columns), columns)
    formula, model, batch, run = others
    sections = [formula, model, stages, batch, run, ranks]
    return ("\n\n" if apart else "\n").join("\n".join(lines) for lines in sections)


def height(lines: Sequence[str], columns: int | None) -> int:
    """Return how many lines of a screen with so many columns a text takes."""
    return sum(max(1, -(-len(line) // (columns or len(line) or 1))) for line in lines)


def _shortened(table: list[str], most: int, columns: int | None) -> list[str]:
    """Return the header and the first rows of a table, and the last, so that it takes at most so many lines, but three
    rows in any case."""
    most = max(3, most // max(height([line], columns) for line in table))
    if len(table) <= most:
        return table
    kept = [*table[: most - 2], table[-1]]
    return [*kept[:-1], f"  ...  {len(table) - len(kept)} rows more, which `| less` shows", kept[-1]]


def _formula(config: Config) -> list[str]:
    sizes = axis_sizes(config.layout)
    switches = [
        ("sequence parallel", config.layout.sequence_parallel),
        ("distributed optimizer", config.layout.sharding is ZERO_1),
        ("overlapped gradient reduction", config.layout.overlap_grad_reduce),
        ("overlapped parameter gathering", config.layout.overlap_param_gather),
        (
            f"{config.optimizer.optimizer_offload_fraction:.0%} of the optimizer state in host memory",
            config.optimizer.optimizer_cpu_offload,
        ),
        ("weights, gradients and optimizer state in host memory", config.layout.torch_fsdp2_cpu_offload),
    ]
    lines = [f"world size {config.layout.world_size} = TP {sizes.tp} x PP {sizes.pp} x CP {sizes.cp} x DP {sizes.dp}"]
    if config.model.num_experts is not None:
        experts = expert_axis_sizes(config.layout)
        lines.append(
            f"experts on them: ETP {experts.etp} x EP {experts.ep} x expert DP {experts.edp} x PP {experts.pp}"
        )
    active = [name for name, on in switches if on]
    if active:
        lines.append("with " + ", ".join(active))
    return lines


def _model(config: Config) -> list[str]:
    padding = config.model.padded_vocab_size - config.data.vocab_size
    total = count(config) - vocabulary_padding(config)
    return [
        *_experts(config),
        f"parameters           {total:,} ({parameters_without_embeddings(config):,} without embeddings and output)",
        f"vocabulary           {config.model.padded_vocab_size:,} rows, {padding:,} of them padding",
        f"FLOPs per token      {flops_per_token(config):,} (forward and backward, causal attention)",
        *(line for formats in brought("product_formats") for line in formats.described(config)),
    ]


def _experts(config: Config) -> list[str]:
    every_layer = layers(config)
    mixtures = Counter(layer.experts for layer in every_layer if layer.experts is not None)
    if not mixtures:
        return []
    return [
        *(_mixture(experts, number, len(every_layer)) for experts, number in mixtures.items()),
        f"active parameters    {active_parameters(config):,} for each token, vocabulary padding included",
    ]


def _mixture(experts: Experts, number: int, of: int) -> str:
    beside = f", and shared ones of width {experts.shared.width:,}" if experts.shared is not None else ""
    where = f", in {number} of {of} layers" if number < of else ""
    each = f"{experts.top_k} of {experts.count} of width {experts.mlp.width:,}"
    return f"experts              {each} for each token{beside}{where}"


def _stages(config: Config) -> list[str]:
    per_rank, of_experts = count_per_rank(config), count_per_rank(config, experts=True)
    bytes_each, bytes_of_experts = state_bytes(config).total, state_bytes(config, expert=True).total
    each = f"{bytes_each:g} bytes a parameter"
    if any(of_experts) and bytes_of_experts != bytes_each:
        each += f", {bytes_of_experts:g} of an expert"
    lines = ["stage  layers                          parameters per rank  weights + gradients + optimizer per rank"]
    for stage, chunks in enumerate(chunk_layers(config)):
        layers = " ".join(_layer_range(chunk) for chunk in chunks)
        if config.model.mtp_num_layers and stage == len(per_rank) - 1:
            layers += f" (last {config.model.layers_ahead}: MTP)"
        rest = per_rank[stage] - of_experts[stage]
        memory = _bytes(rest * bytes_each + of_experts[stage] * bytes_of_experts)
        lines.append(f"{stage:5d}  {layers:<30}  {per_rank[stage]:>19,}  {memory} ({each})")
    return lines


def _batch(config: Config) -> list[str]:
    training, data_size = config.training, config.layout.data_parallel_size
    microbatches = num_microbatches(config, training.global_batch_size)
    lines = [
        f"micro batch          {training.micro_batch_size} samples of {config.model.seq_length:,} tokens",
        f"microbatches         {microbatches} per rank and step",
        f"effective batch      {training.micro_batch_size} x {microbatches} x DP {data_size} = "
        f"{training.global_batch_size:,} samples (TP, CP and PP do not count)",
        f"tokens per step      {training.global_batch_size * config.model.seq_length:,}",
    ]
    schedule = schedule_of(config, microbatches)
    bubble, is_table = schedule.bubble, isinstance(schedule, TableSchedule)
    if bubble or is_table:
        by = "simulated: F, I and W alike" if is_table else "(p-1)/(v*m+p-1)"
        lines.append(f"pipeline bubble      {bubble / (microbatches + bubble):.1%} of the time, {by}")
    if is_table:
        each = [1.0 / schedule.chunks] * schedule.chunks
        held = [most_held(schedule.order(stage), each, [0.0] * len(each)).bytes for stage in range(schedule.stages)]
        lines.append(f"in flight at most    {' '.join(f'{most:g}' for most in held)} microbatches, stage by stage")
    return lines


def _run(config: Config) -> list[str]:
    phases = batch_phases(config)
    samples = sum(phase.steps * phase.global_batch_size for phase in phases)
    tokens = samples * config.model.seq_length
    lines = [f"run                  {training_steps(config):,} steps, {samples:,} samples, {tokens:,} tokens"]
    if len(phases) > 1:
        lines.append(f"batch ramp-up        from {phases[0].global_batch_size} in {len(phases)} phases")
    return lines


def _ranks(config: Config) -> list[str]:
    layout, world = config.layout, config.layout.world_size
    if world <= _MOST_RANKS_LISTED:
        experts = config.model.num_experts is not None
        lines = ["rank  (tp, cp, dp, pp)" + ("  (etp, ep, edp, pp)" if experts else "")]
        for rank in range(world):
            of_experts = f"  {tuple(expert_coordinates(layout, rank))}" if experts else ""
            lines.append(f"{rank:4d}  {tuple(coordinates(layout, rank))}{of_experts}")
        return lines
    lines = ["stage  ranks          rank: (tp, cp, dp, pp)"]
    per_stage = world // layout.pipeline_model_parallel_size
    for stage in range(layout.pipeline_model_parallel_size):
        first = rank_of(layout, coordinates(layout, 0)._replace(pp=stage))
        some = ", ".join(
            f"{rank}: {tuple(coordinates(layout, rank))}" for rank in range(first, first + min(3, per_stage))
        )
        span = f"{first}-{first + per_stage - 1}"
        lines.append(f"{stage:5d}  {span:<13}  {some}{', ...' if per_stage > 3 else ''}")
    return lines


def _layer_range(layers: range) -> str:
    if not layers:
        return "none"
    return f"{layers.start}" if len(layers) == 1 else f"{layers.start}-{layers.stop - 1}"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.2f} kB"


CPU_PROCESS_GB = 0.9
"""Peak resident memory of a CPU process that trains next to nothing (one layer of width 32; torch 2.15)."""

USABLE = 0.92
"""Share of a device's memory that a layout may fill, as by default in `megatron-ext plan`."""


def verdict(
    config: Config, *, device_memory_gb: float | None = None, device_name: str | None = None
) -> tuple[list[str], bool]:
    """Return lines about the memory of the rank that needs most, and whether it fits; True where no memory is given.

    Args:
        config: a resolved and validated configuration.
        device_memory_gb: memory of one device in GB (1e9 bytes); overrides the memory of the named device.
        device_name: a row of `plan.hardware.TABLE`.
    Raises:
        ConfigurationError: there is no device of that name.
    """
    if device_name is not None and device_name not in TABLE:
        raise ConfigurationError(
            f"--device-name {device_name} is not one of {', '.join(TABLE)}; use --device-memory-gb for another device"
        )
    stage, needed = estimate(config, fused=config.layout.device != "cpu")
    parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in needed.parts.items())
    lines = [f"memory of a rank     {needed.total / 1e9:.2f} GB on stage {stage}, estimated: {parts}"]
    if config.layout.device == "cpu":
        lines.append(
            f"                     and about {CPU_PROCESS_GB} GB of the process itself: Python, torch, megatron-core"
        )
    memory = device_memory_gb or (TABLE[device_name].memory_gb if device_name is not None else None)
    if memory is None:
        lines.append("                     (--device-memory-gb 80 or --device-name h100 says whether it fits)")
        return lines, True
    usable = memory * USABLE
    fits = needed.total / 1e9 <= usable
    what = device_name if device_name is not None and device_memory_gb is None else f"{memory:g} GB"
    answer = "fits" if fits else f"does not fit, {needed.largest} being the largest part"
    lines.append(f"on {what:<18}{answer}: {needed.total / 1e9:.2f} of {usable:.1f} GB ({USABLE:.0%} of {memory:g})")
    if not fits:
        flags = fitting_flags(config, usable * 1e9)
        lines.append(
            "                     megatron-ext plan searches for another layout that fits"
            if flags is None
            else f"                     add {flags}, and it fits, by the same estimate"
        )
    return lines, fits
