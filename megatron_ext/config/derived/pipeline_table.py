"""Checks and simulates what a table says of a pipeline (`pipeline_tables.py`)."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

from megatron_ext.config.derived.pipeline_split import stage_of_chunk
from megatron_ext.pipeline_tables import Action, Rows


def rank_of(virtual: int, ranks: int, *, v_shaped: bool) -> int:
    """Return the rank that has a virtual stage."""
    return stage_of_chunk(virtual % ranks, virtual // ranks, ranks, v_shaped=v_shaped)


def simulated(
    table: Rows,
    stages: int,
    seconds: Callable[[int, Action], float] = lambda _rank, _action: 1.0,
    delay: float = 0.0,
    rank: Callable[[int], int] | None = None,
) -> tuple[dict[Action, float], list[tuple[int, int]]]:
    """Return when each pass ends, and where ranks wait for what never comes: (rank, index of the pass that it waits to
    begin).

    Args:
        table: who runs what when.
        stages: number of virtual stages.
        seconds: of a pass, by rank and action.
        delay: seconds of one message between ranks.
        rank: the rank of a virtual stage, where messages take time.
    """
    done: dict[Action, float] = {}
    at, free, waits = [0] * len(table), [0.0] * len(table), list(range(len(table)))
    while waits:
        moved = False
        for here in waits:
            row = table[here]
            while at[here] < len(row):
                action = row[at[here]]
                need = _need(action, stages, done)
                if need is not None and need not in done:
                    break
                sent = need is not None and rank is not None and rank(need.stage) != here
                arrived = 0.0 if need is None else done[need] + delay * sent
                free[here] = done[action] = max(free[here], arrived) + seconds(here, action)
                at[here], moved = at[here] + 1, True
        waits = [here for here in waits if at[here] < len(table[here])]
        if not moved:
            break
    return done, [(here, at[here]) for here in waits]


def _need(action: Action, stages: int, done: dict[Action, float]) -> Action | None:
    """Return the pass whose result a pass waits for."""
    stage, kind, microbatch = action
    if kind == "F":
        return action._replace(stage=stage - 1) if stage > 0 else None
    if kind == "W":
        return action._replace(kind="I")
    if stage == stages - 1:
        return action._replace(kind="F")
    split = Action(stage + 1, "I", microbatch)
    return split if split in done else split._replace(kind="B")


def flaws(table: Rows, ranks: int, chunks: int, microbatches: int, *, v_shaped: bool) -> Iterator[str]:
    """Yield what is wrong with a table: entries that cannot be, passes that are missing or come too early, ranks that
    would wait for each other for ever. A line is that of the file."""
    virtual, shape = ranks * chunks, "V" if v_shaped else "loop"
    if len(table) != ranks:
        yield f"it has {len(table)} lines, and --pipeline-model-parallel-size is {ranks}"
        return
    lines = [rank_of(stage, ranks, v_shaped=v_shaped) + 1 for stage in range(virtual)]
    seen: set[Action] = set()
    begun = Counter[int]()
    for rank, row in enumerate(table):
        for place, action in enumerate(row, 1):
            where = f"line {rank + 1}, pass {place} ({action})"
            stage, kind, microbatch = action
            if stage >= virtual or microbatch >= microbatches:
                yield f"{where}: there are {virtual} stages and {microbatches} microbatches, both from 0"
            elif lines[stage] != rank + 1:
                yield f"{where}: stage {stage} of a {shape} of {ranks} ranks is on line {lines[stage]}"
            elif action in seen or (kind in "BI" and action._replace(kind="BI".replace(kind, "")) in seen):
                yield f"{where} is there twice"
            elif kind == "F" and microbatch != begun[stage]:
                yield f"{where} comes before {stage}F{begun[stage]}: forward passes are in the microbatches' order"
            elif kind != "F" and action._replace(kind="I" if kind == "W" else "F") not in seen:
                yield f"{where} comes before {action._replace(kind='I' if kind == 'W' else 'F')}"
            else:
                seen.add(action)
                begun[stage] += kind == "F"
                continue
            return
    for stage, microbatch in itertools.product(range(virtual), range(microbatches)):
        forward, whole, inputs, weights = (Action(stage, kind, microbatch) for kind in "FBIW")
        if whole not in seen and weights not in seen:
            missing = weights if inputs in seen else f"{whole}, or {inputs} and {weights},"
            missing = missing if forward in seen else forward
            yield f"line {lines[stage]}: {missing} is missing"
            return
    _, stuck = simulated(table, virtual)
    if stuck:
        waits = ", ".join(f"line {rank + 1} to begin {table[rank][at]}" for rank, at in stuck[:4])
        yield f"its ranks wait for each other for ever: {waits}"
