"""Searches every combination that the program's own rules allow: what it needs, and which fit and are fastest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ext.config.options import flag_of
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.plan.choices import (
    BETTER,
    SHARDINGS,
    Choice,
    hybrid,
    layouts,
    micro_batches,
    recomputations,
    shardings,
)
from megatron_ext.plan.estimate import StepTime, step_time
from megatron_ext.plan.hardware import Machine
from megatron_ext.plan.memory import MemoryEstimate, worst_stage
from megatron_ext.plan.shapes import Shapes
from megatron_ext.rules.sharding import RULES_OF_KINDS
from megatron_ext.rules.validate import Rule, broken_rule, is_legal, problems


@dataclass(frozen=True)
class Question:
    """States what is to be planned."""

    values: Mapping[str, Any]
    """What the user typed, by field name; what is not there may be chosen."""

    facts: Facts
    world_size: int
    machine: Machine
    usable_bytes: float
    """Bytes of memory of one device that a layout may fill."""

    gradients_in_16_bits: bool = False
    """Whether gradients are kept and summed in 16 bits, which pretrain_gpt.py itself does in fp16 alone."""


@dataclass(frozen=True)
class Candidate:
    """A layout that the program accepts."""

    choice: Choice
    config: Config
    sharding: str
    recomputation: str
    stage: int
    """Pipeline stage that needs most memory."""

    memory: MemoryEstimate
    time: StepTime | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        assert self.time is not None
        return self.time.total

    @property
    def simplicity(self) -> tuple[int, ...]:
        """Key of the order from simple to less simple: smaller is simpler, for layouts that take equally long."""
        layout = self.config.layout
        return (
            layout.model_parallel_size,
            layout.virtual_pipeline_model_parallel_size,
            layout.use_distributed_optimizer + 2 * layout.use_torch_fsdp2 + 3 * layout.use_megatron_fsdp,
            self.config.training.micro_batch_size,
        )


@dataclass(frozen=True)
class Answer:
    """What the search found."""

    best: list[Candidate]
    """The layouts that fit in memory, fastest first."""

    fitting: int
    legal: int
    nearest: Candidate | None
    """The layout that needs least memory; None where no layout is legal."""

    refusals: list[str]
    """What the rules said to the simplest layout, where none is legal."""

    contenders: list[Candidate] = field(default_factory=list)
    """The layouts that were simulated: the best and those next to them."""


def search(question: Question, number: int) -> Answer:
    """Return the `number` best layouts, each another way to share the model."""
    found = _search(question, number)
    if found.best or found.nearest is None or "optimizer_cpu_offload" in question.values:
        return found
    # Host memory is slow: only where nothing else fits.
    moved = _search(replace(question, values={**question.values, "optimizer_cpu_offload": True}), number)
    if not moved.best:
        return found
    best = [replace(each, choice={**each.choice, "optimizer_cpu_offload": True}) for each in moved.best]
    return replace(moved, best=best)


def _search(question: Question, number: int) -> Answer:
    fitting: list[Candidate] = []
    nearest: Candidate | None = None
    legal = 0
    for candidate in _candidates(question):
        legal += 1
        if nearest is None or candidate.memory.total < nearest.memory.total:
            nearest = candidate
        if candidate.memory.total <= question.usable_bytes:
            fitting.append(_timed(candidate, question, quick=True))
    fitting.sort(key=_rank)
    different = list({_way(candidate): candidate for candidate in reversed(fitting)}.values())
    shortlist = sorted(different, key=_rank)[: 3 * number]
    best = sorted((_timed(candidate, question) for candidate in shortlist), key=_rank)
    refusals = [] if legal else _refusals(question)
    return Answer(best[:number], len(fitting), legal, nearest, refusals, best)


def simpler_layouts(question: Question) -> Iterator[Candidate]:
    """Yield the plain ways first: each sharding without TP, CP and PP (but what the user gave), one sample at a
    time."""
    plain = next(layouts({**_PLAIN, **question.values}, question.world_size, question.machine.gpus_per_node), {})
    ways = recomputations(question.values)
    names = list(ways)
    for name, sharding in shardings(question.values).items():
        for recomputation in dict.fromkeys((names[0], names[-1])):
            micro = question.values.get("micro_batch_size") or 1
            choice = {**plain, **sharding, **ways[recomputation], "micro_batch_size": micro}
            found = _legal(question, choice)
            if isinstance(found, tuple):
                yield _candidate(question, choice, found, name, recomputation)


def fewest_ranks(question: Question, most: int) -> int | None:
    """Return the smallest multiple by 2 of the ranks, up to `most`, with which something fits."""
    ranks = question.world_size * 2
    while ranks <= most:
        if any(c.memory.total <= question.usable_bytes for c in _candidates(replace(question, world_size=ranks))):
            return ranks
        ranks *= 2
    return None


def with_offloads(question: Question, candidate: Candidate) -> dict[str, Candidate]:
    """Return by flag the same layout with the optimizer's state, or all that FSDP2 divides, in host memory, where
    legal.

    The value is None where the candidate has one of them already.
    """
    config = candidate.config
    if config.optimizer.optimizer_cpu_offload or config.layout.torch_fsdp2_cpu_offload:
        return {}
    others = {}
    for name in ("optimizer_cpu_offload", "torch_fsdp2_cpu_offload"):
        choice = {**candidate.choice, name: True}
        found = _legal(question, choice)
        if isinstance(found, tuple):
            other = _candidate(question, choice, found, candidate.sharding, candidate.recomputation)
            others[flag_of(name)] = other
    return others


_AXES = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
)
_PLAIN = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "pipeline_model_parallel_size": 1}


def _candidates(question: Question) -> Iterator[Candidate]:
    """Yield every legal layout, sharding and micro batch, with the least recomputation that fits (or else the most)."""
    values = question.values
    batch = values["global_batch_size"]
    refused: set[tuple[str, tuple[bool, ...]]] = set()
    for layout in layouts(values, question.world_size, question.machine.gpus_per_node):
        model_ranks = layout["tensor_model_parallel_size"] * layout["context_parallel_size"]
        data_ranks = question.world_size // (model_ranks * layout["pipeline_model_parallel_size"])
        if batch % data_ranks:
            continue
        alone = data_ranks * layout["context_parallel_size"] == 1
        seen = set()
        kinds = tuple(layout.get(axis, 1) > 1 for axis in _AXES)
        ways = dict(reversed(shardings(values).items()))
        if "FSDP2" in ways and (flags := hybrid(values, layout, question.world_size, question.machine.gpus_per_node)):
            ways["HSDP"] = flags
        for name, sharding in ways.items():
            if (alone and name in (*SHARDINGS, "HSDP") and name != "DDP") or BETTER.get(name) in seen:
                continue
            if (name, kinds) in refused:
                continue
            for micro in micro_batches(values, batch // data_ranks):
                choice = {**layout, **({} if alone else sharding), "micro_batch_size": micro}
                found = _legal(question, choice)
                if found in RULES_OF_KINDS:
                    # With other sizes of the same axes it would be refused as well.
                    refused.add((name, kinds))
                    break
                if not isinstance(found, tuple):
                    continue
                candidate = _with_least_recomputation(question, choice, found, name)
                if candidate is None:
                    continue
                seen.add(name)
                yield candidate
                if candidate.memory.total > question.usable_bytes:
                    break  # larger ones need more


def _with_least_recomputation(
    question: Question, choice: Choice, found: tuple[Config, Shapes], sharding: str
) -> Candidate | None:
    """Return the candidate with the least recomputation that fits; None where the choice is illegal whatever is
    recomputed."""
    candidate, last = None, list(recomputations(question.values))[-1]
    for name, recomputation in recomputations(question.values).items():
        training = replace(found[0].training, **recomputation)
        config = replace(found[0], training=training)
        tried = _candidate(question, {**choice, **recomputation}, (config, found[1]), sharding, name)
        fits = tried.memory.total <= question.usable_bytes
        # Rules are asked where it matters: they take longer than the sums.
        if recomputation and (fits or name == last) and not is_legal(config, question.facts):
            continue
        candidate = tried
        if fits:
            break
    return candidate


def _legal(question: Question, choice: Choice) -> tuple[Config, Shapes] | Rule:
    """Return what the choice resolves to, or a rule of the program that it breaks."""
    config = resolved(question, choice)
    return broken_rule(config, question.facts) or (config, Shapes(config))


def resolved(question: Question, choice: Choice) -> Config:
    """Return what the question's values and a choice resolve to."""
    chosen = {name: value for name, value in choice.items() if value is not None}
    config = resolve({**question.values, **chosen, "world_size": question.world_size}, question.facts)
    if not question.gradients_in_16_bits:
        return config
    return replace(config, training=replace(config.training, accumulate_allreduce_grads_in_fp32=False))


def _candidate(
    question: Question, choice: Choice, found: tuple[Config, Shapes], sharding: str, recomputation: str
) -> Candidate:
    config, shapes = found
    stage, needed = worst_stage(config, shapes, fused=question.machine.devices.is_gpu)
    return Candidate(choice, config, sharding, recomputation, stage, needed)


def _timed(candidate: Candidate, question: Question, *, quick: bool = False) -> Candidate:
    return replace(candidate, time=step_time(candidate.config, Shapes(candidate.config), question.machine, quick=quick))


def _way(candidate: Candidate) -> tuple[object, ...]:
    """Return what makes two layouts different ways to share the model; of each, the fastest is shown."""
    layout = candidate.config.layout
    sizes = layout.tensor_model_parallel_size, layout.context_parallel_size, layout.pipeline_model_parallel_size
    return (*sizes, layout.expert_model_parallel_size, candidate.sharding)


def _rank(candidate: Candidate) -> tuple[float, tuple[int, ...]]:
    # A thousandth more or less is no difference.
    return float(f"{candidate.seconds:.4g}"), candidate.simplicity


def _refusals(question: Question) -> list[str]:
    choice = next(layouts(question.values, question.world_size, question.machine.gpus_per_node), {})
    micro = question.values.get("micro_batch_size") or 1
    return problems(resolved(question, {**choice, "micro_batch_size": micro}), question.facts)
