"""Tables of the passes of a pipeline's ranks, as `torch.distributed.pipelining` has them.

A table has a row for each rank: its passes, in order. A stage here is a virtual one: the number of a model chunk in the
order in which a microbatch passes them. Kinds of passes: F forward, B the whole backward pass, I the part of it that
other stages wait for (the gradient of the inputs), W the rest (the gradients of the weights).

Only torch knows its schedules: asking for one (in a dry run, too) imports torch; other runs do not wait for it.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Action(NamedTuple):
    """One pass of one microbatch through one stage, or its sending or receiving."""

    stage: int
    kind: str
    """F, B, I, W; and with messages SEND_F, RECV_F, SEND_B, RECV_B."""
    microbatch: int


Rows = tuple[tuple[Action, ...], ...]
"""Actions of each rank, in order."""

CLASSES = {
    "gpipe": "ScheduleGPipe",
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}
"""Classes of torch by the names of --pipeline-schedule."""


@dataclass
class _Stage:
    """The attributes of a stage that torch's schedules read when they are made: its place in the pipeline."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: Any = None
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)


@functools.lru_cache(maxsize=64)
def rows(name: str, ranks: int, chunks: int, microbatches: int) -> Rows:
    """Return the table of one of `CLASSES`, for `chunks` model chunks on each rank."""
    from torch.distributed.pipelining import schedules

    stages: Any = [_Stage(rank, ranks * chunks, ranks) for rank in range(chunks)]
    made: Any = getattr(schedules, CLASSES[name])
    order = made(stages[0] if name == "gpipe" else stages, microbatches).pipeline_order
    return tuple(tuple(_flat(order[rank])) for rank in range(ranks))


def _flat(actions: Any) -> Iterator[Action]:
    """Yield the passes alone; a pair that is meant to overlap is one pass after the other here."""
    for action in actions:
        if action is not None and action.sub_actions:
            yield from _flat(action.sub_actions)
        elif action is not None and action.computation_type.value in "FBIW":
            yield Action(action.stage_index, action.computation_type.value, action.microbatch_index)


def with_messages(table: Rows, rank_of: tuple[int, ...]) -> Rows:
    """Return the table with sends and receives (SEND_F, RECV_F, SEND_B, RECV_B).

    torch puts a receive where its send is: all messages have one order in which every rank has its own, so that none
    can wait for another in a circle, whether or not a send returns before its receive is posted.

    Args:
        table: the passes of each rank, in order.
        rank_of: the rank of each stage.
    """
    from torch.distributed.pipelining import schedules

    of_torch: Any = {
        rank: [
            schedules._Action(stage, schedules._ComputationType(kind), microbatch) for stage, kind, microbatch in row
        ]
        for rank, row in enumerate(table)
    }
    lowered = schedules._add_send_recv(of_torch, rank_of.__getitem__, len(rank_of))
    return tuple(
        tuple(Action(a.stage_index, a.computation_type.value, a.microbatch_index) for a in lowered[rank])  # pyright: ignore
        for rank in range(len(table))
    )
