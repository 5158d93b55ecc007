"""Simulates a pipeline that follows a table (`pipeline_tables.py`)."""

import math
from collections.abc import Container, Sequence
from typing import Any

from megatron_ext.config.derived.pipeline_split import stage_of_chunk
from megatron_ext.pipeline_tables import Action, Rows


def rank_of(virtual: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the rank that has a virtual stage."""
    return stage_of_chunk(virtual % ranks, virtual // ranks, ranks, v_shaped=v_shaped)


KINDS = "FBIW"
"""The kinds of passes, in the order in which `Walk` takes their times."""

_BEGINNING, _NOTHING = 0, 1


class Walk:
    """The passes of a table in an order in which each comes after the passes it waits for, however long they take.

    A pass begins when its rank is free and its input has arrived. Places 0 and 1 of the order are the beginning of the
    step and an input that is always present.

    Args:
        table: the passes of each rank, in order.
        stages: number of virtual stages.
    """

    def __init__(self, table: Rows, stages: int):
        place: dict[Any, int] = {}
        ranks, at, last = [-1, -1], [0] * len(table), [_BEGINNING] * len(table)
        self._steps: list[tuple[int, int, int]] = []
        """For each pass: the place of the previous pass of its rank, the place of the pass on another rank that it
        waits for, and the index of its time."""
        placed = -1
        while placed < len(place):
            placed = len(place)
            for rank, row in enumerate(table):
                while at[rank] < len(row):
                    action = row[at[rank]]
                    need = _need(action, stages, place)
                    found = _NOTHING if need is None else place.get(need)
                    if found is None:
                        break
                    kind = len(KINDS) * action[0] + KINDS.index(action[1])
                    self._steps.append((last[rank], found if ranks[found] != rank else _NOTHING, kind))
                    place[action] = last[rank] = len(ranks)
                    ranks.append(rank)
                    at[rank] += 1
        self._passes = tuple(place)
        assert at == [len(row) for row in table], "no rank waits for ever"

    def _done(self, seconds: Sequence[float], delay: float) -> list[float]:
        done = [0.0, -math.inf]
        append = done.append
        for before, need, kind in self._steps:
            free, arrived = done[before], done[need] + delay
            append((arrived if arrived > free else free) + seconds[kind])
        return done

    def total(self, seconds: Sequence[float], delay: float = 0.0) -> float:
        """Return when the last pass ends (see `ends`)."""
        return max(self._done(seconds, delay))

    def ends(self, seconds: Sequence[float], delay: float = 0.0) -> dict[Action, float]:
        """Return when each pass ends.

        Args:
            seconds: of a pass of each of `KINDS`, stage by stage.
            delay: seconds of one message between ranks.
        """
        return dict(zip(self._passes, self._done(seconds, delay)[2:], strict=True))


def _need(action: Action, stages: int, done: Container[Any]) -> tuple[int, str, int] | None:
    """Return the pass whose result a pass waits for: equal to an `Action`, which takes longer to make."""
    stage, kind, microbatch = action
    if kind == "F":
        return (stage - 1, "F", microbatch) if stage > 0 else None
    if kind == "W":
        return stage, "I", microbatch
    if stage == stages - 1:
        return stage, "F", microbatch
    split = stage + 1, "I", microbatch
    return split if split in done else (stage + 1, "B", microbatch)
