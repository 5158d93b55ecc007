"""What limits a layout: its time with one part of the devices a tenth faster, or slower, than it is."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ext.plan.estimate import time_of
from megatron_ext.plan.hardware import Machine
from megatron_ext.plan.search import Candidate, Question, search

PARTS = {
    "matrix products": ("peak_16bit_tflops", "peak_tf32_tflops", "peak_fp32_tflops"),
    "memory bandwidth": ("memory_bandwidth_gb_s",),
    "links inside a node": ("intra_node_gb_s",),
    "links to other nodes": ("inter_node_gb_s",),
}
"""The fields of the hardware table that make up each part."""

MEMORY = "memory size"


@dataclass(frozen=True)
class Limit:
    """What one part of the devices gives or takes."""

    part: str
    faster: float
    """Change of the step's time with 10% more of it, as a share: below 0 where the step gets faster."""

    slower: float
    """The same with 10% less."""

    winner_faster: int
    """Place in the list, from 0, of the layout that is fastest with 10% more; -1 for one that is not in the list."""

    winner_slower: int


def limits(question: Question, best: Sequence[Candidate], by: float = 0.1, *, searched: bool = True) -> list[Limit]:
    """Return what each part limits, the largest gain first.

    Args:
        best: the layouts to compare, fastest first; the changes are those of the first one, but for the memory, with
            which another search finds another layout.
        by: share by which a part gets faster or slower.
        searched: whether the layouts were chosen; more memory is of no use to one that was given.
    """
    rows = []
    for part, names in PARTS.items():
        more, less = (_retimed(best, _scaled(question.machine, names, 1 + sign * by)) for sign in (1, -1))
        rows.append(_limit(part, best, more, less))
    if not searched:
        return sorted(rows, key=lambda limit: limit.faster)
    more, less = (_with_memory(question, 1 + sign * by) for sign in (1, -1))
    rows.append(
        Limit(
            MEMORY,
            _change(best[0].seconds, more),
            _change(best[0].seconds, less),
            0 if more is not None and more >= 0.999 * best[0].seconds else -1,
            0 if less is not None and less <= 1.001 * best[0].seconds else -1,
        )
    )
    return sorted(rows, key=lambda limit: limit.faster)


def table(ordered: Sequence[Limit], best: Sequence[Candidate], by: float = 0.1) -> list[str]:
    """Return the limits as a table."""
    rows = [["", f"{by:.0%} more", f"{by:.0%} less", ""]]
    for limit in ordered:
        rows.append([limit.part, _share(limit.faster), _share(limit.slower), _winners(limit)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"what limits 1 ({best[0].seconds:.3g} s): its time with more and less of"]
    for part, more, less, winners in rows:
        lines.append(f"{part:<{widths[0]}}  {more:>{widths[1]}}  {less:>{widths[2]}}  {winners}".rstrip())
    return lines


def _limit(part: str, best: Sequence[Candidate], more: Sequence[float], less: Sequence[float]) -> Limit:
    now = best[0].seconds
    return Limit(part, more[0] / now - 1, less[0] / now - 1, _winner(more), _winner(less))


def _winner(seconds: Sequence[float]) -> int:
    # A thousandth more or less is no difference.
    return 0 if seconds[0] <= 1.001 * min(seconds) else min(range(len(seconds)), key=lambda index: seconds[index])


def _retimed(best: Sequence[Candidate], machine: Machine) -> list[float]:
    return [time_of(candidate.work, machine).total for candidate in best]


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
