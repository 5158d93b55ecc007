"""Evaluates one layout as it was given: nothing is chosen, nothing is left out that does not fit."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import flops_per_token
from megatron_ext.cost.hardware import Machine
from megatron_ext.cost.memory import MemoryEstimate, host_bytes, stage_memory
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.workload import Workload
from megatron_ext.parts.stack import stack
from megatron_ext.plugins.planner.estimate import StepTime, step_time
from megatron_ext.plugins.planner.plan_report import correction, on_host
from megatron_ext.plugins.planner.search import Candidate, Question, resolved
from megatron_ext.rules.validate import problems

_GIGA = 1e9


@dataclass(frozen=True)
class Evaluation:
    """A legal layout: its time, its memory and whether that fits."""

    config: Config
    machine: Machine
    time: StepTime
    stages: list[MemoryEstimate]
    """The bytes that a rank of each pipeline stage needs."""

    usable_bytes: float

    @property
    def seconds(self) -> tuple[float, float, float]:
        """Seconds of a step: the estimate, and between what nine of ten runs are expected."""
        low, high = self.machine.range
        return self.time.total, low * self.time.total, high * self.time.total

    @property
    def worst_stage(self) -> int:
        """The stage that needs most memory."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)

    @property
    def memory_bytes(self) -> float:
        """Bytes that a rank of that stage needs."""
        return self.stages[self.worst_stage].total

    @property
    def fits(self) -> bool:
        """Whether every stage fits into what may be filled of a device."""
        return self.memory_bytes <= self.usable_bytes

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second of all devices."""
        return self.config.training.global_batch_size * self.config.model.seq_length / self.time.total

    def tflops(self, *, full_attention: bool) -> float:
        """Return the TFLOP/s of a device, recomputation not counted.

        Args:
            full_attention: count all keys of a sequence for every query (Megatron-LM's convention), not only those
                that causality leaves (ours).
        """
        each = flops_per_token(self.config)
        if full_attention:
            length = self.config.model.seq_length
            each += round(stack(self.config).total(lambda layer: 3 * layer.core_flops(length)))
        return self.tokens_per_second * each / self.config.layout.world_size / 1e12

    def mfu(self, *, full_attention: bool) -> float:
        """Return the share of the peak: model FLOPs utilization."""
        return self.tflops(full_attention=full_attention) * 1e12 / self.machine.devices.peak_flops(self.config.training)


def evaluate(question: Question) -> Evaluation | list[str]:
    """Return the evaluation of the layout in the question's values, or the problems that the program's rules find in
    it."""
    config = resolved(question, {})
    return problems(config, question.facts) or evaluate_config(config, question.machine, question.usable_bytes)


def evaluate_config(config: Config, machine: Machine, usable: float) -> Evaluation:
    """Return the evaluation of a validated configuration."""
    work = Workload(config, Shapes(config), fused=machine.devices.is_gpu)
    stages = [stage_memory(work, stage) for stage in range(len(work.shapes.counts))]
    return Evaluation(config, machine, step_time(config, work.shapes, machine), stages, usable)


def as_candidate(result: Evaluation) -> Candidate:
    """Return the layout as if a search had found it, for the functions that report on candidates."""
    worst = result.worst_stage
    work = Workload(result.config, Shapes(result.config), fused=result.machine.devices.is_gpu)
    return Candidate({}, result.config, "as given", "as given", worst, result.stages[worst], work, result.time)


def as_json(result: Evaluation) -> dict[str, Any]:
    """Return everything that is known of a layout."""
    seconds, low, high = result.seconds
    world_size = result.config.layout.world_size
    return {
        "legal": True,
        "world_size": world_size,
        "device": result.machine.devices.name,
        "step_seconds": seconds,
        "step_seconds_low": low,
        "step_seconds_high": high,
        "tokens_per_second": result.tokens_per_second,
        "tokens_per_second_per_gpu": result.tokens_per_second / world_size,
        "tflops_per_gpu": result.tflops(full_attention=False),
        "tflops_per_gpu_full_attention": result.tflops(full_attention=True),
        "mfu": result.mfu(full_attention=False),
        "mfu_full_attention": result.mfu(full_attention=True),
        "memory_bytes": result.memory_bytes,
        "usable_bytes": result.usable_bytes,
        "fits": result.fits,
        "worst_stage": result.worst_stage,
        "memory_by_stage": [{**stage.parts, "total": stage.total} for stage in result.stages],
        "seconds": result.time.parts,
        "bubble_share": result.time.bubble_share,
        "exposed_seconds": {axis: result.time.parts[axis] for axis in ("tp", "cp", "ep", "pp", "dp")},
        "hidden_seconds": result.time.hidden_by_axis,
        "sent_bytes": result.time.sent_bytes,
        "correction": result.machine.correction,
        "measured_ratio": result.machine.measured_ratio,
        "times": "estimates",
    }


def refusal_as_json(world_size: int, machine: Machine, reasons: list[str]) -> dict[str, Any]:
    """Return keys of `as_json` for a layout that the rules refuse: no numbers, but the reasons."""
    unknown = dict.fromkeys(
        ("step_seconds", "step_seconds_low", "step_seconds_high", "tokens_per_second", "mfu", "memory_bytes")
    )
    return {
        "legal": False,
        "world_size": world_size,
        "device": machine.devices.name,
        **unknown,
        "fits": False,
        "problems": reasons,
    }


def as_text(result: Evaluation) -> list[str]:
    """Return the evaluation in words."""
    seconds, low, high = result.seconds
    time, devices = result.time, result.machine.devices
    world_size = result.config.layout.world_size
    causal, full = result.tflops(full_attention=False), result.tflops(full_attention=True)
    lines = [
        f"{seconds:.4g} s a step ({low:.3g} to {high:.3g} for nine of ten runs), an estimate for {world_size:,} x "
        f"{devices.name}{correction(result.machine)}",
        f"{result.tokens_per_second:,.0f} tokens/s, {result.tokens_per_second / world_size:,.0f} per device; "
        f"{causal:.0f} TFLOP/s ({result.mfu(full_attention=False):.1%} of the peak) with causal attention, {full:.0f} "
        f"({result.mfu(full_attention=True):.1%}) with all of it",
        "where the time goes: " + ", ".join(f"{part} {share:.3g} s" for part, share in time.parts.items() if share),
        f"bubble: {time.bubble_share:.1%} of the pipeline's time",
        "communication: " + _communication(time),
        "",
        *_memory(result),
    ]
    return [*lines, on_host(result.config, result.machine)] if host_bytes(result.config) else lines


def _communication(time: StepTime) -> str:
    exposed = {axis: time.parts[axis] for axis in ("tp", "cp", "ep", "pp", "dp")}
    parts = [
        f"{axis} {seconds:.3g} s exposed" + (f", {hidden:.3g} hidden" if hidden else "")
        for axis, seconds in exposed.items()
        if (hidden := time.hidden_by_axis.get(axis, 0.0)) or seconds
    ]
    return "; ".join(parts) or "none"


def _memory(result: Evaluation) -> list[str]:
    names = list(result.stages[0].parts)
    lines = ["GB of a rank of stage  " + "".join(f"{name:>13}" for name in (*names, "total"))]
    for numbers, stage in _alike(result.stages):
        parts = [*stage.parts.values(), stage.total]
        lines.append(f"{numbers:<23}" + "".join(f"{size / _GIGA:13.2f}" for size in parts))
    worst = result.stages[result.worst_stage]
    if result.fits:
        lines.append(
            f"fits: {result.memory_bytes / _GIGA:.1f} of {result.usable_bytes / _GIGA:.1f} GB that may be filled"
        )
        return lines
    over = (result.memory_bytes - result.usable_bytes) / _GIGA
    largest = sorted(worst.parts.items(), key=lambda part: -part[1])[:3]
    too_much = [str(stage) for stage, each in enumerate(result.stages) if each.total > result.usable_bytes]
    lines.append(
        f"does not fit: stage {result.worst_stage} needs {over:.1f} GB more than the {result.usable_bytes / _GIGA:.1f} "
        f"that may be filled; most is {', '.join(f'{name} {size / _GIGA:.1f}' for name, size in largest)}; stages over "
        f"it: {', '.join(too_much)}"
    )
    return lines


def _alike(stages: list[MemoryEstimate]) -> list[tuple[str, MemoryEstimate]]:
    """Return runs of stages that need the same, by their numbers."""
    runs: list[tuple[int, int, MemoryEstimate]] = []
    for number, stage in enumerate(stages):
        if runs and dataclasses.astuple(runs[-1][2]) == dataclasses.astuple(stage):
            runs[-1] = (runs[-1][0], number, stage)
        else:
            runs.append((number, number, stage))
    return [(f"{first}" if first == last else f"{first}-{last}", stage) for first, last, stage in runs]
