"""Presents a plan in words: the table, why its first row, why not something simpler, and the flags."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron_ext.config.derived.batch_size import num_microbatches
from megatron_ext.config.derived.sharding import ZERO_1
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import flops_per_token
from megatron_ext.cost.hardware import Machine
from megatron_ext.cost.memory import host_bytes
from megatron_ext.parts.catalogue import count
from megatron_ext.plugins.pages.charts import BARS_STYLE, bars_chart, bars_picture, main, page, wide
from megatron_ext.plugins.pages.markup import Markup, element
from megatron_ext.plugins.planner.layout_choices import Choice, flags
from megatron_ext.plugins.planner.search import Answer, Candidate, Question

_GIGA = 1e9
_PARTS = {
    "weights": "wts",
    "gradients": "grads",
    "optimizer": "opt",
    "activations": "acts",
    "loss": "loss",
    "work": "work",
}


def head(question: Question, config_of: Candidate) -> list[str]:
    """Return lines on the question (devices, model, batch), and on the kind of numbers that follow."""
    devices, config = question.machine.devices, config_of.config
    true_size = replace(config.model, padded_vocab_size=config.data.vocab_size)
    return [
        f"{question.world_size} x {devices.name}, {question.machine.gpus_per_node} in a node; "
        f"{devices.memory_gb:g} GB each, of which {_gb(question.usable_bytes)} may be filled",
        f"model of {count(replace(config, model=true_size)):,} parameters; "
        f"{config.training.global_batch_size:,} samples of {config.model.seq_length:,} tokens a step",
        "Memory is formula (the rest of a device is for CUDA, NCCL and fragmentation). Times are estimates, not "
        f"measurements{correction(question.machine)}; of ten runs nine take {question.machine.range[0]:.2f} to "
        f"{question.machine.range[1]:.2f} times as long. Try the best few.",
    ]


def correction(machine: Machine) -> str:
    """Return the correction of the estimates by a measured run (--calibrate), in parentheses; empty without one."""
    if machine.correction is None:
        return ""
    ratio = machine.measured_ratio
    return (
        f" (multiplied by {machine.correction:.3f}, because the run of --calibrate took {ratio:.3f} times its estimate)"
    )


def table(best: Sequence[Candidate], machine: Machine) -> list[str]:
    """Return one row for each layout: memory of the worst stage by part in GB, and the estimated step."""
    rows = [["", "layout", "GB", *_PARTS.values(), "m", "bubble", "sent GB", "s/step", "range", "where the time goes"]]
    for number, candidate in enumerate(best, start=1):
        memory, time = candidate.memory, candidate.time
        assert time is not None
        shares = sorted(time.parts.items(), key=lambda part: -part[1])
        rows.append(
            [
                str(number),
                name(candidate),
                _gb(memory.total),
                *(_gb(memory.parts[part]) for part in _PARTS),
                str(num_microbatches(candidate.config, candidate.config.training.global_batch_size)),
                f"{time.bubble_share:.1%}",
                _gb(time.sent_bytes),
                f"{time.total:.3g}",
                "-".join(f"{share * time.total:.3g}" for share in machine.range),
                ", ".join(f"{part} {share / time.total:.0%}" for part, share in shares if share >= 0.005 * time.total)
                + (f"; hidden {time.hidden / time.total:.0%}" if time.hidden >= 0.005 * time.total else ""),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = {1, len(widths) - 1}
    return [
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def with_short_gradients(candidates: Sequence[Candidate], machine: Machine) -> list[str]:
    """Return the rows of layouts that 2-byte gradients would make possible, and the flags of the first of them."""
    if not candidates:
        return []
    return [
        "faster with --grad-reduce-in-bf16, which keeps and sums gradients in 2 bytes instead of 4, less exactly:",
        *(f"    {line}" for line in table(candidates, machine)),
        f"    flags of 1: {command(candidates[0].choice)}",
        "",
    ]


def name(candidate: Candidate) -> str:
    """Return a layout's name: `TP2 CP1 PP4x2 DP8, ZeRO-1, recompute none, micro batch 1`."""
    layout = candidate.config.layout
    chunks = layout.virtual_pipeline_model_parallel_size
    sizes = [
        f"TP{layout.tensor_model_parallel_size}{'+SP' if layout.sequence_parallel else ''}",
        f"CP{layout.context_parallel_size}",
        f"PP{layout.pipeline_model_parallel_size}{f'x{chunks}' if chunks > 1 else ''}",
        f"DP{layout.data_parallel_size}",
    ]
    if candidate.config.model.num_experts is not None:
        sizes.append(f"EP{layout.expert_model_parallel_size}")
    recomputed = "" if candidate.recomputation == "none" else f", recompute {candidate.recomputation}"
    moved = ""
    if layout.torch_fsdp2_cpu_offload:
        moved = ", weights and optimizer in host memory"
    elif candidate.config.optimizer.optimizer_cpu_offload:
        moved = ", optimizer in host memory"
    micro = candidate.config.training.micro_batch_size
    return f"{' '.join(sizes)}, {candidate.sharding}{recomputed}, micro batch {micro}{moved}"


def speed(candidate: Candidate, machine: Machine) -> str:
    """Return a sentence on the first layout's speed, and on the state that it keeps in host memory."""
    config = candidate.config
    tokens = config.training.global_batch_size * config.model.seq_length / candidate.seconds
    each, share = tokens / config.layout.world_size, _share_of_peak(candidate, machine)
    text = f"1 trains {tokens:,.0f} tokens a second, {each:,.0f} a device: {share:.1%} of the peak (causal attention)"
    return text + (f"; it keeps {on_host(config, machine)}" if host_bytes(config) else "")


def _share_of_peak(candidate: Candidate, machine: Machine) -> float:
    config = candidate.config
    tokens = config.training.global_batch_size * config.model.seq_length / candidate.seconds
    peak = config.layout.world_size * machine.devices.peak_flops(config.training)
    return tokens * flops_per_token(config) / peak


def on_host(config: Config, machine: Machine) -> str:
    """Return the bytes that a rank of the fullest stage keeps in host memory, and that a node of such ranks does."""
    each, ranks = host_bytes(config, fullest=True), min(machine.gpus_per_node, config.layout.world_size)
    return f"{_gb(each)} GB a device in host memory, up to {_gb(each * ranks)} GB a node"


def why(best: Sequence[Candidate], question: Question) -> str:
    """Return a sentence on the largest part of the first layout's memory, where its time goes, and what the second
    layout loses."""
    first = best[0]
    assert first.time is not None
    part = first.memory.largest
    text = (
        f"why 1: it fits into {_gb(first.memory.total)} of {_gb(question.usable_bytes)} GB, most of it "
        f"{part} ({_gb(first.memory.parts[part])}); {first.time.compute / first.time.total:.0%} of its time is "
        "matrix products"
    )
    if len(best) > 1 and best[1].time is not None:
        second = best[1].time
        more = {key: seconds - first.time.parts[key] for key, seconds in second.parts.items()}
        largest = max(more, key=lambda key: more[key])
        slower = second.total / first.time.total - 1
        if slower < 0.001:
            return f"{text}. 2 takes as long, and is less simple"
        text += (
            f". 2 takes {slower:.1%} longer: {largest} {first.time.parts[largest]:.3g} s -> {second.parts[largest]:.3g}"
        )
    return text


def simpler(candidates: Iterable[Candidate], question: Question) -> list[str]:
    """Return which of the plain ways fit, and what those need that do not."""
    lines = []
    for candidate in candidates:
        title = _plain_name(candidate)
        fits = candidate.memory.total <= question.usable_bytes
        need = _gb(candidate.memory.total)
        lines.append(f"    {title:<24}{'fits' if fits else 'does not fit'}, {need} GB: {_largest(candidate)}")
    head = "with no TP, CP and PP but what was given, and the smallest micro batch"
    return [f"the plain ways, {head}:", *lines] if lines else [f"no plain way is legal, {head}"]


def memory_picture(candidates: Iterable[Candidate], question: Question) -> Markup:
    """Return the memory of the plain ways as an SVG file, in GB, next to what may be filled."""
    rows = {_plain_name(each): {part: size / _GIGA for part, size in each.memory.parts.items()} for each in candidates}
    title = f"Memory of the fullest device, {question.world_size} x {question.machine.devices.name}"
    return bars_picture(title, "GB", rows, question.usable_bytes / _GIGA)


def as_page(question: Question, candidates: Sequence[Candidate], lines: Iterable[str]) -> Markup:
    """Return layouts as a page: memory, time of a step and utilization of each, from 0, and its flags.

    Args:
        question: what was asked.
        candidates: the layouts, each with its time, in the order of their numbers.
        lines: what stands above.
    """
    numbered = {str(number): each for number, each in enumerate(candidates, start=1)}
    memory = {
        number: {part: size / _GIGA for part, size in each.memory.parts.items()} for number, each in numbered.items()
    }
    charts = [bars_chart("Memory", "GB", memory, question.usable_bytes / _GIGA)]
    timed = {number: each for number, each in numbered.items() if each.time is not None}
    if timed:
        shares = {number: {"": 100 * _share_of_peak(each, question.machine)} for number, each in timed.items()}
        charts.append(bars_chart("Step", "s", {number: _seconds(each) for number, each in timed.items()}))
        charts.append(bars_chart("Model FLOPs utilization", "%", shares))
    layouts = [
        [element("p", f"{number}: {name(each)}"), element("pre", command(each.choice))]
        for number, each in numbered.items()
    ]
    title = f"Layouts on {question.world_size:,} x {question.machine.devices.name}"
    return page(title, lines, [main(charts), wide("Flags of each layout", *layouts)], style=BARS_STYLE)


def _seconds(candidate: Candidate) -> dict[str, float]:
    """Return the seconds of a step by part, with all communication added up as one part."""
    assert candidate.time is not None
    seconds = dict(candidate.time.parts)
    sent = sum(seconds.pop(axis) for axis in ("tp", "cp", "ep", "pp", "dp"))
    return {"compute": seconds.pop("compute"), "communication": sent, **seconds}


def _plain_name(candidate: Candidate) -> str:
    recomputed = candidate.recomputation not in ("none", "as given")
    return candidate.sharding + (f", recompute {candidate.recomputation}" if recomputed else "")


def nothing_fits(answer: Answer, question: Question, ranks: int | None, offloads: Mapping[str, Candidate]) -> list[str]:
    """Return lines on the layout that comes nearest to fitting, and on changes that would make it fit.

    Args:
        ranks: number of ranks with which something fits; None where no number that was tried does.
        offloads: the nearest layout with more of it in host memory, by flag.
    """
    nearest = answer.nearest
    assert nearest is not None
    need = nearest.memory.total
    share = question.usable_bytes / (question.machine.devices.memory_gb * _GIGA)
    usable = _gb(question.usable_bytes)
    lines = [
        f"Nothing fits: of {answer.legal:,} legal layouts the nearest needs {_gb(need)} GB of {usable}:",
        f"  {name(nearest)}",
        f"  {_largest(nearest)}; stage {nearest.stage}",
        "What would make it fit:",
    ]
    if ranks is not None:
        lines.append(f"  {ranks} devices instead of {question.world_size}")
    lines.append(f"  devices of {_gb(need / share)} GB")
    for flag, offloaded in offloads.items():
        verdict = "fits" if offloaded.memory.total <= question.usable_bytes else "is not enough"
        kept = on_host(offloaded.config, question.machine)
        lines.append(f"  {flag}: {_gb(offloaded.memory.total)} GB, which {verdict}; {kept}")
    pinned = [word for word in _PINNED if question.values.get(word) is not None]
    if pinned:
        lines.append(f"  leave to the planner: {' '.join(_as_typed(word, question.values[word]) for word in pinned)}")
    if nearest.memory.largest in ("activations", "loss", "work"):
        lines.append("  a shorter --seq-length")
    return lines


def as_json(question: Question, answer: Answer, short: Sequence[Candidate]) -> dict[str, Any]:
    """Return everything that the report is made of.

    Args:
        short: layouts that are faster with 2-byte gradients.
    """
    return {
        "world_size": question.world_size,
        "device": vars(question.machine.devices),
        "gpus_per_node": question.machine.gpus_per_node,
        "efficiency": question.machine.matmul_share,
        "link_efficiency": {"inside": question.machine.intra_share, "between": question.machine.inter_share},
        "correction": question.machine.correction,
        "measured_ratio": question.machine.measured_ratio,
        "range": question.machine.range,
        "usable_bytes": question.usable_bytes,
        "times": "estimates",
        "memory": "formula",
        "legal": answer.legal,
        "fitting": answer.fitting,
        "best": [_row(candidate) for candidate in answer.best],
        "faster_with_grad_reduce_in_bf16": [_row(candidate) for candidate in short],
        "nearest": None if answer.nearest is None else _row(answer.nearest),
    }


def command(choice: Choice) -> str:
    """Return the command line of a layout."""
    return " ".join(flags(choice))


_PINNED = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    *ZERO_1.values,
    "recompute_granularity",
    "micro_batch_size",
)


def _as_typed(name: str, value: object) -> str:
    """Return a flag with its value, also where that is the default, since it is held on to."""
    if isinstance(value, bool):
        return flag_of(name) if value else f"{flag_of(name)}=false"
    return f"{flag_of(name)} {value}"


def _largest(candidate: Candidate) -> str:
    parts = sorted(candidate.memory.parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{part} {_gb(size)}" for part, size in parts[:3])


def _gb(size: float) -> str:
    """Return bytes in GB, with two digits where there are less than 0.1."""
    return f"{size / _GIGA:.1f}" if size == 0 or size >= 0.1 * _GIGA else f"{size / _GIGA:.2g}"


def _row(candidate: Candidate) -> dict[str, Any]:
    time = candidate.time
    return {
        "layout": name(candidate),
        "flags": flags(candidate.choice),
        "worst_stage": candidate.stage,
        "bytes": {**candidate.memory.parts, "total": candidate.memory.total},
        "seconds": None if time is None else {**time.parts, "total": time.total},
        "hidden_seconds": None if time is None else time.hidden,
        "bubble_share": None if time is None else time.bubble_share,
        "sent_bytes": None if time is None else time.sent_bytes,
    }
