"""Runs the batch of a loss spike again, from the same weights, and judges whether the data or a machine made it.

A replica is the ranks that hold the model once: the tensor-, context- and pipeline-parallel ranks of one data-parallel
rank. In the second run each replica computes the microbatches of another one, with its dropout masks. A microbatch is
then the same samples, the same weights and the same kernels on other hardware: its loss must be the same but for
rounding. Where one is not, a third run, in yet another place where there is one, tells who is wrong.
"""

import math
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_ext.train.random_state import RandomState, random_state, set_random_state
from megatron_ext.train.run import Run
from megatron_ext.train.step import run_microbatches

_ROUNDING = {4: 1e-4, 2: 1e-2}
"""Relative difference of two losses of a microbatch that rounding explains, by the bytes of an activation."""


class Place(NamedTuple):
    """Place of a microbatch: the replica that has it in training, and its number on that replica."""

    replica: int
    microbatch: int


class Computed(NamedTuple):
    """Result that a replica computed for a microbatch."""

    replica: int
    loss: float
    """Mean over its tokens, in nats; NaN where none counts."""


Results = dict[Place, list[Computed]]


@dataclass(frozen=True)
class Verdict:
    """Outcome of the repeated runs of a batch; equal on every rank."""

    results: Results
    """The runs of each microbatch, in their order."""

    differing: list[Place]
    """Microbatches that had another loss in another run, the largest difference first."""

    suspects: list[int]
    """Replicas that are wrong, the most suspicious first; empty where nothing differs."""


def judge(run: Run, first: torch.Tensor, samples: range, before: RandomState) -> Verdict:
    """Run the batch once more, or twice, without gradients. Collective. It leaves the generators as they are.

    Args:
        first: losses of the microbatches in training, see `run_microbatches`.
        samples: positions of the samples of the batch.
        before: `random_state` when the step began.
    """
    after = random_state(run)
    replicas = run.groups.dp.size()
    states: list[RandomState] = [None] * replicas
    torch.distributed.all_gather_object(states, before, group=run.groups.dp)
    results: Results = {}
    try:
        _add(results, _of_all(run, first), 0)
        for shift in _shifts(run):
            _add(results, _of_all(run, _run_again(run, len(first), samples, states, shift)), shift)
            if not _differing(results, run):
                break
    finally:
        set_random_state(run, after)
    differing = _differing(results, run)
    return Verdict(results, differing, _suspects([results[position] for position in differing]))


def _shifts(run: Run) -> tuple[int, int]:
    """Return the numbers of places that the replicas move in the second and in the third run."""
    replicas, sharing = run.groups.dp.size(), run.groups.ep.size()
    # Ranks that share the experts would only meet the same ones again, while there are others.
    step = sharing if replicas > sharing else 1
    return step % replicas, 2 * step % replicas


def _run_again(run: Run, count: int, samples: range, states: Sequence[RandomState], shift: int) -> torch.Tensor:
    """Run the microbatches of the replica that is `shift` places further. Collective."""
    replica = (run.groups.dp.rank() + shift) % run.groups.dp.size()
    with run.progress.loading():
        microbatches = run.loaders.train.microbatches_of(replica, samples.start, count)
    set_random_state(run, states[replica])
    with run.sharding.gathered_before_update(run.chunks), torch.no_grad():
        return run_microbatches(run, microbatches, forward_only=True)


def _of_all(run: Run, losses: torch.Tensor) -> dict[int, list[float]]:
    """Return every replica's results: the mean losses of its microbatches, in their order. Collective."""
    holds = run.is_last_stage and run.groups.tp.rank() == 0
    own = (run.groups.dp.rank(), run.groups.cp.rank(), losses.double().tolist()) if holds else None
    of_ranks: list[tuple[int, int, list[list[float]]] | None] = [None] * run.world_size
    torch.distributed.all_gather_object(of_ranks, own)
    replicas: dict[int, list[list[list[float]]]] = {}
    for replica, _, pairs in sorted(one for one in of_ranks if one is not None):
        replicas.setdefault(replica, []).append(pairs)
    return {replica: [_mean(parts) for parts in zip(*ranks, strict=True)] for replica, ranks in replicas.items()}


def _mean(parts: Sequence[Sequence[float]]) -> float:
    """Return the mean loss of a microbatch, of which context-parallel ranks have (sum of losses, tokens)."""
    tokens = sum(part[1] for part in parts)
    return sum(part[0] for part in parts) / tokens if tokens else math.nan


def _add(results: Results, computed: Mapping[int, Sequence[float]], shift: int) -> None:
    for replica, losses in computed.items():
        for number, loss in enumerate(losses):
            position = Place((replica + shift) % len(computed), number)
            results.setdefault(position, []).append(Computed(replica, loss))


def _differing(results: Results, run: Run) -> list[Place]:
    limit = _ROUNDING[run.config.training.params_bytes]
    apart = {batch: max(_distance(runs[0].loss, one.loss) for one in runs) for batch, runs in results.items()}
    return sorted((batch for batch in apart if apart[batch] > limit), key=lambda batch: (-apart[batch], batch))


def _distance(one: float, other: float) -> float:
    """Return the relative difference; 0 for two that are NaN, or the same infinity."""
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def _suspects(differing: Sequence[Sequence[Computed]]) -> list[int]:
    """Return the replicas that are to blame, the one of most microbatches first."""
    return [replica for replica, _ in Counter(_suspect(runs) for runs in differing).most_common()]


def _suspect(runs: Sequence[Computed]) -> int:
    """Return who is wrong about a microbatch: who contradicts itself, or all others, or else has the higher loss."""
    for one in runs:
        if any(other.replica == one.replica and _distance(one.loss, other.loss) > 0 for other in runs):
            return one.replica
    replicas = {one.replica for one in runs}
    for one in runs:
        others = [other for other in runs if other is not one]
        if len(replicas) > 2 and _distance(others[0].loss, others[1].loss) < 0.1 * _distance(one.loss, others[0].loss):
            return one.replica
    return max(runs, key=lambda one: math.inf if math.isnan(one.loss) else one.loss).replica


def who(run: Run) -> dict[int, str]:
    """Return the ranks and machines of every replica, in words. Collective."""
    ranks: list[tuple[int, int, str]] = [(0, 0, "")] * run.world_size
    torch.distributed.all_gather_object(ranks, (run.groups.dp.rank(), run.rank, socket.gethostname()))
    return {replica: _named([one for one in ranks if one[0] == replica]) for replica in {one[0] for one in ranks}}


def _named(members: Sequence[tuple[int, int, str]]) -> str:
    ranks, machines = sorted(rank for _, rank, _ in members), sorted({machine for _, _, machine in members})
    several = "s" if len(machines) > 1 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} (machine{several} {', '.join(machines)})"
