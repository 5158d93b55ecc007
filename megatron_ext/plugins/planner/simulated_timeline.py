"""Makes the timeline of a step that nobody has run yet: megatron-core's order, with the estimated times of the passes.

Memory is estimated by `cost/memory.py`: state at all times, activations of a microbatch between its forward and its
backward pass, and what a pass needs while it runs. Collectives that a pass waits for are drawn at its end.

`simulate` computes when every pass of the pipeline ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ext.config.derived.batch_size import num_microbatches
from megatron_ext.config.schema import Config
from megatron_ext.cost.hardware import Machine
from megatron_ext.cost.memory import OverTime, over_time
from megatron_ext.cost.schedule import Schedule, named, schedule_of
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.plugins.planner.estimate import pass_times, step_time
from megatron_ext.plugins.planner.simulate import simulate
from megatron_ext.plugins.planner.timeline import COMMUNICATION, Block, Lane, Pass, Timeline

Table = Sequence[Sequence[float]]
"""Numbers by stage and chunk."""


@dataclass(frozen=True)
class _Drawn:
    """Values to draw, by stage and chunk: seconds of passes and collectives, and memory needs by stage."""

    forward: Table
    backward: Table
    sent: tuple[Table, Table] | None = None
    """Seconds of exposed collectives in a forward and in a backward pass."""

    needs: Sequence[OverTime] = ()


def preview(config: Config, machine: Machine, microbatches: int | None = None) -> Timeline:
    """Return the estimated timeline of a resolved and validated configuration.

    Args:
        microbatches: number of microbatches to draw; by default as many as show how the pipeline fills, is steady and
            drains, and no more than there are.
    """
    shapes, there_are = Shapes(config), num_microbatches(config, config.training.global_batch_size)
    schedule = schedule_of(config, there_are)
    stages, chunks = schedule.stages, schedule.chunks
    times, whole = pass_times(config, shapes, machine), step_time(config, shapes, machine)
    needs = {stage: over_time(config, stage, shapes, fused=machine.devices.is_gpu) for stage in range(stages)}
    drawn = _Drawn(times.forward, times.backward, (times.forward_sent, times.backward_sent), list(needs.values()))
    number = _shown(schedule, microbatches)
    lanes = _lanes(drawn, replace(schedule, microbatches=number), times.send)
    end = max(lane.passes[-1].end for lane in lanes)
    pipeline = simulate(schedule, times.forward, times.backward, times.send).total
    # What the estimate has beyond the passes: gradients that are summed between ranks, and the update. Waiting for the
    # slowest rank is spread over the whole step, of which this draws a part.
    total = end + max(whole.total - whole.wait - pipeline, 0.0)
    updates = max(total - whole.optimizer, end)
    after = [("gradients", end, updates), ("update", updates, total)]
    blocks = tuple(Block(*each) for each in after if each[2] - each[1] > 1e-9 * total)
    few = f", {number} of {there_are:,} microbatches" if number < there_are else f", {there_are:,} microbatches"
    chunked = f" x {chunks} chunks" if chunks > 1 else ""
    low, high = (share * whole.total for share in machine.range)
    waiting = f", {whole.wait:.2g} s of it for the slowest rank, which is not drawn" if whole.wait else ""
    return Timeline(
        title=f"{stages} stages{chunked}{few}: simulated, with estimated times",
        lanes=tuple(
            Lane(lane.name, lane.passes, (*lane.blocks, *blocks), (*lane.memory, (end, needs[stage].always)))
            for stage, lane in enumerate(lanes)
        ),
        chunks=chunks,
        total=total,
        notes=(
            f"The whole step of {there_are:,} microbatches takes {whole.total:.3g} s by the estimate ({low:.3g} to "
            f"{high:.3g} for nine of ten runs){waiting}; in it the busiest stage waits {whole.bubble_share:.1%} "
            "of the time until the last pass ends.",
        ),
    )


def equal_stages(
    stages: int, chunks: int, microbatches: int, group: int | None = None, name: str | None = None
) -> Timeline:
    """Return the timeline of stages that are alike, whose forward pass takes 1 and whose backward pass takes 2.

    Args:
        name: a schedule of torch, or a file; None: megatron-core's.
    """
    forward = [[1.0 / chunks] * chunks] * stages
    backward = [[2.0 / chunks] * chunks] * stages
    schedule = Schedule(stages, chunks, microbatches, (group or stages) if chunks > 1 else 1)
    if name is not None:
        schedule = named(name, stages, chunks, microbatches)
    lanes = _lanes(_Drawn(forward, backward), schedule, 0.0)
    chunked = f" x {chunks} chunks" if chunks > 1 else ""
    of = f", {name}" if name is not None else ""
    total = max(lane.passes[-1].end for lane in lanes)
    return Timeline(
        title=f"{stages} stages{chunked}, {microbatches} microbatches{of}: equal stages, backward passes twice as long",
        lanes=tuple(lanes),
        chunks=chunks,
        total=total,
        unit="",
        notes=(f"Each stage waits {1 - 3 * microbatches / total:.1%} of the time until the last pass ends.",),
    )


def _shown(schedule: Schedule, wanted: int | None) -> int:
    """Return the number of microbatches to draw: whole groups where they are interleaved, and all of a table."""
    if type(schedule) is not Schedule:
        return schedule.microbatches
    enough = wanted or max(2 * schedule.stages, 2 * schedule.group, 4)
    if enough >= schedule.microbatches:
        return schedule.microbatches
    return max(enough // schedule.group, 1) * schedule.group


def _lanes(drawn: _Drawn, schedule: Schedule, delay: float) -> list[Lane]:
    """Return the lane of each stage."""
    done = schedule.ends(drawn.forward, drawn.backward, delay)
    of_stages: list[list[Pass]] = [[] for _ in drawn.forward]
    for (stage, work), end in done.items():
        seconds = (drawn.forward if work.forward else drawn.backward)[stage][work.chunk] * schedule.share(work)
        of_stages[stage].append(Pass(work.forward, work.chunk, work.microbatch, end - seconds, end, work.half))
    return [
        Lane(
            f"stage {stage}",
            tuple(passes),
            _sent(drawn, stage, passes),
            _memory(drawn.needs[stage], passes) if drawn.needs else (),
        )
        for stage, passes in enumerate(of_stages)
    ]


def _sent(drawn: _Drawn, stage: int, passes: Sequence[Pass]) -> tuple[Block, ...]:
    """Return the time that each pass waits for collectives, as blocks at its end."""
    if drawn.sent is None:
        return ()
    sends = [(each.end, drawn.sent[0 if each.forward else 1][stage][each.chunk]) for each in passes]
    return tuple(Block(COMMUNICATION, end - seconds, end) for end, seconds in sends if seconds > 0.0)


def _memory(needs: OverTime, passes: Sequence[Pass]) -> tuple[tuple[float, float], ...]:
    """Return (second, bytes) whenever a stage begins or ends a pass."""
    now, moments = needs.always, [(0.0, needs.always)]
    for each in passes:
        now += needs.held[each.chunk] if each.forward else 0.0
        moments.append((each.begin, now + needs.for_a_while[each.chunk]))
        now -= 0.0 if each.forward or each.half == "inputs" else needs.held[each.chunk]
        moments.append((each.end, now))
    return tuple(moments)
