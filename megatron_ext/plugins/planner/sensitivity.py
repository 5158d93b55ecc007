"""Computes how sensitive a plan is. Limits of a layout: its time with one part of the devices a tenth faster, or
slower, than it is. Assumptions that decide: whether another layout wins where the machine is a little faster or slower
than assumed; and which other batches and world sizes there are where few layouts are legal.

What 2-byte gradients would make possible: `--grad-reduce-in-bf16` halves their memory and their traffic, and sums
them less exactly, so that the search never chooses it by itself.

NVIDIA's own benchmarks are run so (NeMo-Framework-Launcher, examples/training/llama/h100/llama3_8b_bf16.sh:
`optim.grad_sync_dtype=bf16`), and some of their layouts do not fit with gradients of 4 bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_ext.cost.hardware import Machine
from megatron_ext.plugins.planner.estimate import time_of
from megatron_ext.plugins.planner.layout_choices import layouts
from megatron_ext.plugins.planner.plan_report import name
from megatron_ext.plugins.planner.search import Answer, Candidate, Question, search, timed, tried_again

_LEAST_GAIN = 0.005
_MOST = 1.2  # the largest change of a part of the machine


def hinges(question: Question, answer: Answer) -> list[str]:
    """Return a line for each assumption that decides which layout is first, and one where none does."""
    lines = []
    first = answer.best[0]
    # No part changes by more, so that those further behind cannot win.
    near = [candidate for candidate in answer.contenders if candidate.seconds <= _MOST * first.seconds]
    by_formula = [_by_formula(candidate, question.machine) for candidate in near]
    for text, machine in _others(question.machine):
        changes = [_by_formula(each, machine) / before for each, before in zip(near, by_formula, strict=True)]
        own = next(
            each.seconds * change for each, change in zip(near, changes, strict=True) if each.config == first.config
        )
        index = _fastest(near, changes, question.machine)
        gain = own / (near[index].seconds * changes[index]) - 1
        if gain > _LEAST_GAIN:
            lines.append(f"    {text}, {name(near[index])} wins by {gain:.1%}")
    if not lines:
        return ["1 stays first with matrix products 10%, links 20% or memory 20% faster or slower than assumed"]
    return ["the winner hangs on assumptions:", *lines]


def _others(machine: Machine) -> Iterator[tuple[str, Machine]]:
    devices = machine.devices
    for word, factor in (("more", 1.1), ("less", 1 / 1.1)):
        yield f"at 10% {word} efficiency of matrix products", replace(machine, efficiency=machine.matmul_share * factor)
    for word, factor in (("faster", _MOST), ("slower", 1 / _MOST)):
        for title, field in (("between nodes", "inter_node_gb_s"), ("inside of nodes", "intra_node_gb_s")):
            changed = replace(devices, **{field: getattr(devices, field) * factor})
            yield f"with links {title} 20% {word}", replace(machine, devices=changed)
        changed = replace(devices, memory_bandwidth_gb_s=devices.memory_bandwidth_gb_s * factor)
        yield f"with memory 20% {word}", replace(machine, devices=changed)


def _fastest(near: list[Candidate], changes: list[float], machine: Machine) -> int:
    """Return the place of the candidate whose seconds times its change are fewest, which is simulated for that."""
    while True:
        index = min(range(len(near)), key=lambda index: near[index].seconds * changes[index])
        if near[index].simulated:
            return index
        near[index] = timed(near[index], machine)


def _by_formula(candidate: Candidate, machine: Machine) -> float:
    return time_of(candidate.work, machine, bubble="formula").total


def alternatives(question: Question) -> list[str]:
    """Return batches and world sizes near those asked for that more layouts can divide; nothing where half of the
    data-parallel sizes divide the batch."""
    batch, sizes = question.values["global_batch_size"], _data_sizes(question, question.world_size)
    if not sizes or 2 * sum(batch % size == 0 for size in sizes) >= len(sizes):
        return []
    lines = [
        f"of the data-parallel sizes that {question.world_size:,} devices allow "
        f"({', '.join(map(str, sizes[:8]))}{', ...' if len(sizes) > 8 else ''}) "
        f"{sum(batch % size == 0 for size in sizes)} divide --global-batch-size {batch:,}; others are there with"
    ]
    for near in _near_batches(batch, sizes):
        divide = [size for size in sizes if near % size == 0]
        lines.append(f"    --global-batch-size {near:,}: data-parallel sizes {', '.join(map(str, divide[:8]))}")
    fewer = _fewer_devices(question, batch)
    if fewer is not None:
        lines.append(f"    {fewer:,} devices and the same batch")
    return lines


def _data_sizes(question: Question, world_size: int) -> list[int]:
    """Return the data-parallel sizes of all ways to share the model, ascending."""
    sizes = set()
    for layout in layouts(question.values, world_size, question.machine.gpus_per_node):
        model = layout["tensor_model_parallel_size"] * layout["context_parallel_size"]
        sizes.add(world_size // (model * layout["pipeline_model_parallel_size"]))
    return sorted(sizes)


def _near_batches(batch: int, sizes: list[int]) -> list[int]:
    """Return up to three batches, none over a quarter away, that most of the sizes divide."""
    near = [size * round(batch / size) for size in sizes] + [size * (batch // size + 1) for size in sizes]
    close = [each for each in dict.fromkeys(near) if 0 < abs(each - batch) <= batch / 4]
    return sorted(close, key=lambda each: (-sum(each % size == 0 for size in sizes), abs(each - batch)))[:3]


def _fewer_devices(question: Question, batch: int) -> int | None:
    """Return the most devices, below those asked for and in whole nodes, of which some data-parallel size divides the
    batch."""
    node = question.machine.gpus_per_node
    for world_size in range((question.world_size - 1) // node * node, 0, -node):
        sizes = _data_sizes(question, world_size)
        if sizes and 2 * sum(batch % size == 0 for size in sizes) >= len(sizes):
            return world_size
    return None


_LEAST_GAIN_OF_SHORT_GRADIENTS = 0.01


def with_short_gradients(question: Question, answer: Answer) -> list[Candidate]:
    """Return up to three layouts that are faster by 1% or more with 2-byte gradients than the best without, fastest
    first; none where nothing fits, or what was given says how gradients are kept."""
    values = question.values
    said = any(values.get(name) for name in ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"))
    if not answer.best or said or not values.get("bf16") or values.get("main_grads_dtype"):
        return []
    limit = answer.best[0].seconds / (1 + _LEAST_GAIN_OF_SHORT_GRADIENTS)
    short = {"grad_reduce_in_bf16": True}
    resolved = {**short, "accumulate_allreduce_grads_in_fp32": False}
    # If the best layout keeps its optimizer in host memory, that flag is kept.
    moved = {name: True for name in ("optimizer_cpu_offload",) if answer.best[0].choice.get(name)}
    candidates = tried_again(question, answer.tight, resolved, limit, 3)
    return [replace(each, choice={**each.choice, **moved, **short}) for each in candidates]


PARTS = {
    "matrix products": ("peak_16bit_tflops", "peak_tf32_tflops", "peak_fp32_tflops"),
    "memory bandwidth": ("memory_bandwidth_gb_s",),
    "links inside a node": ("intra_node_gb_s",),
    "links to other nodes": ("inter_node_gb_s",),
}
"""The fields of the hardware table that make up each part."""

MEMORY = "memory size"
_MORE_AND_LESS = (1.1, 0.9)


@dataclass(frozen=True)
class Limit:
    """Effect on the step's time of one part of the devices, with 10% more and 10% less of it."""

    part: str
    faster: float
    """Change of the step's time with 10% more of it, as a share: below 0 where the step gets faster."""

    slower: float
    """Change of the step's time with 10% less of it, as a share."""

    winner_faster: int
    """Place in the list, from 0, of the layout that is fastest with 10% more; -1 for one that is not in the list."""

    winner_slower: int


def limits(question: Question, best: Sequence[Candidate], *, searched: bool = True) -> list[Limit]:
    """Return the effect of each part of the devices on the step's time, largest gain first.

    Args:
        best: the layouts to compare, fastest first; the changes are of the first layout's time; for memory, of the time
            of the best layout that another search finds with more or less of it.
        searched: whether the layouts were chosen; more memory is of no use to one that was given.
    """
    rows, now = [], best[0].seconds
    for part, names in PARTS.items():
        machines = [_scaled(question.machine, names, factor) for factor in _MORE_AND_LESS]
        more, less = ([time_of(candidate.work, machine).total for candidate in best] for machine in machines)
        rows.append(Limit(part, more[0] / now - 1, less[0] / now - 1, _winner(more), _winner(less)))
    if not searched:
        return sorted(rows, key=lambda limit: limit.faster)
    more, less = (_with_memory(question, factor) for factor in _MORE_AND_LESS)
    rows.append(
        Limit(
            MEMORY,
            _change(now, more),
            _change(now, less),
            0 if more is not None and more >= 0.999 * now else -1,
            0 if less is not None and less <= 1.001 * now else -1,
        )
    )
    return sorted(rows, key=lambda limit: limit.faster)


def table(ordered: Sequence[Limit], best: Sequence[Candidate]) -> list[str]:
    """Return the limits as a table."""
    rows = [["", "10% more", "10% less", ""]]
    for limit in ordered:
        rows.append([limit.part, _share(limit.faster), _share(limit.slower), _winners(limit)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"what limits 1 ({best[0].seconds:.3g} s): its time with more and less of"]
    for part, more, less, winners in rows:
        lines.append(f"{part:<{widths[0]}}  {more:>{widths[1]}}  {less:>{widths[2]}}  {winners}".rstrip())
    return lines


def _winner(seconds: Sequence[float]) -> int:
    # A thousandth more or less is no difference.
    return 0 if seconds[0] <= 1.001 * min(seconds) else min(range(len(seconds)), key=lambda index: seconds[index])


def _scaled(machine: Machine, names: Sequence[str], factor: float) -> Machine:
    scaled = {name: getattr(machine.devices, name) * factor for name in names}
    return replace(machine, devices=replace(machine.devices, **scaled))


def _with_memory(question: Question, factor: float) -> float | None:
    """Return the seconds of the best layout with another size of memory; None where nothing fits."""
    answer = search(replace(question, usable_bytes=question.usable_bytes * factor), 1)
    return answer.best[0].seconds if answer.best else None


def _change(now: float, other: float | None) -> float:
    return float("inf") if other is None else other / now - 1


def _share(change: float) -> str:
    if change == float("inf"):
        return "nothing fits"
    return "0.0%" if abs(change) < 0.0005 else f"{change:+.1%}"


def _winners(limit: Limit) -> str:
    if limit.part == MEMORY:
        return "another layout" if limit.winner_faster or limit.winner_slower else ""
    places = (("more", limit.winner_faster), ("less", limit.winner_slower))
    return ", ".join(f"{index + 1} wins with {word}" for word, index in places if index > 0)
