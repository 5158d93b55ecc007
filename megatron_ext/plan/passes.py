"""When every pass of a pipeline ends: the simulation that `simulate` does, with all of its passes."""

from collections.abc import Sequence

from megatron_ext.plan.schedule import Work, order, waits_for


def ends(
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    microbatches: int,
    group: int,
    delay: float = 0.0,
) -> dict[tuple[int, Work], float]:
    """Return when each pass ends, by stage and pass; those of a stage stand in the order in which it works.

    Args:
        forward, backward: seconds of one microbatch by stage and chunk.
        group: microbatches that one chunk takes before the next one's turn.
        delay: seconds of one send.
    """
    stages, chunks = len(forward), len(forward[0])
    left = [list(reversed(order(stage, stages, chunks, microbatches, group))) for stage in range(stages)]
    done: dict[tuple[int, Work], float] = {}
    clock = [0.0] * stages
    while any(left):
        before = len(done)
        for stage in range(stages):
            while left[stage]:
                work = left[stage][-1]
                need = waits_for(stage, work, stages, chunks)
                if need is not None and need not in done:
                    break
                arrived = 0.0 if need is None else done[need] + (delay if need[0] != stage else 0.0)
                seconds = (forward if work.forward else backward)[stage][work.chunk]
                clock[stage] = done[stage, left[stage].pop()] = max(clock[stage], arrived) + seconds
        assert len(done) > before, "a schedule that waits for itself"
    return done
