"""Searches every combination that the program's own rules allow: computes the memory that each needs, and finds the
ones that fit and are fastest."""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_ext.config.derived.sharding import FLAGS, scheme_of
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config, TrainingConfig
from megatron_ext.cost.hardware import Machine
from megatron_ext.cost.memory import MemoryEstimate, fits, state_fits, worst_stage
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.workload import Portions, Workload
from megatron_ext.plugins.planner.estimate import Bubble, StepTime, at_least, formula_at_least, time_of
from megatron_ext.plugins.planner.layout_choices import (
    BETTER,
    SHARDINGS,
    Choice,
    hybrid,
    layouts,
    micro_batches,
    recomputations,
    shardings,
)
from megatron_ext.rules.sharding_rules import RULES_OF_KINDS
from megatron_ext.rules.validate import (
    RULES,
    RULES_OF_LAYOUTS,
    RULES_OF_MICRO_BATCHES,
    RULES_OF_RECOMPUTATION,
    Rule,
    broken_rule,
    problems,
)
from megatron_ext.terminal import tracked


@dataclass(frozen=True)
class Question:
    """States what is to be planned."""

    values: Mapping[str, Any]
    """Values that the user typed, by field name; the search may choose the fields that are missing."""

    facts: Facts
    world_size: int
    machine: Machine
    usable_bytes: float
    """Bytes of memory of one device that a layout may fill."""


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
    work: Workload
    time: StepTime | None = None
    simulated: bool = False
    """Whether the time comes from the simulated pipeline; else it is a lower bound of the simulated time, or the time
    by the formula."""

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
            (None, *FLAGS).index(layout.sharding.flag),
            self.config.training.micro_batch_size,
        )


@dataclass(frozen=True)
class Answer:
    """The result of a search."""

    best: list[Candidate]
    """The layouts that fit in memory, fastest first."""

    fitting: int
    legal: int
    nearest: Candidate | None
    """The layout that needs least memory; None where no layout is legal."""

    refusals: list[str]
    """Problems that the rules find in the simplest layout, where no layout is legal."""

    contenders: list[Candidate] = field(default_factory=list)
    """The best and those next to them, which were only simulated where they could have been among the best."""

    tight: list[Candidate] = field(default_factory=list)
    """The layouts that do not fit, or only with something computed anew."""


def search(question: Question, number: int) -> Answer:
    """Return the `number` best layouts, each another way to share the model."""
    answer = _search(question, number)
    if answer.best or answer.nearest is None or "optimizer_cpu_offload" in question.values:
        return answer
    # Host memory is slow: only where nothing else fits.
    moved = _search(replace(question, values={**question.values, "optimizer_cpu_offload": True}), number)
    if not moved.best:
        return answer
    best = [replace(each, choice={**each.choice, "optimizer_cpu_offload": True}) for each in moved.best]
    return replace(moved, best=best)


def _search(question: Question, number: int) -> Answer:
    fitting: list[Candidate] = []
    tight: list[Candidate] = []
    nearest: Candidate | None = None
    legal = 0
    for candidate in _candidates(question):
        legal += 1
        if nearest is None or candidate.memory.total < nearest.memory.total:
            nearest = candidate
        fits = candidate.memory.total <= question.usable_bytes
        if fits:
            fitting.append(candidate)
        if not fits or candidate.recomputation not in ("none", "as given"):
            tight.append(candidate)
    shortlist = _fastest_ways(fitting, question, 3 * number)
    best, others = _simulated(shortlist, question, number)
    refusals = [] if legal else _refusals(question)
    return Answer(best, len(fitting), legal, nearest, refusals, [*best, *others], tight)


def tried_again(
    question: Question, candidates: Iterable[Candidate], training: Mapping[str, Any], limit: float, number: int
) -> list[Candidate]:
    """Return up to `number` of some layouts that fit and take less than `limit` seconds with other values of training,
    fastest first, each with the least recomputation that fits then."""
    fitting = []
    chosen = {name for way in recomputations(question.values).values() for name in way}
    values = tuple({**dict.fromkeys(chosen), **training}.items())
    recomputed = _Recomputations(question)
    for each in candidates:
        if at_least(each.work.plain, question.machine) >= limit:
            continue
        config = replace(each.config, training=_changed(each.config.training, values))
        work = _work(question, config, each.work.shapes, each.work)
        choice = {name: value for name, value in each.choice.items() if name not in chosen}
        candidate, _ = _with_least_recomputation(recomputed, choice, work, each.sharding, 0)
        if candidate is not None and candidate.memory.total <= question.usable_bytes:
            fitting.append(candidate)
    best, _ = _simulated(_fastest_ways(fitting, question, number), question, number)
    return [each for each in best if each.seconds < limit and broken_rule(each.config, question.facts) is None]


def _fastest_ways(fitting: list[Candidate], question: Question, number: int) -> list[Candidate]:
    """Return the fastest layout of each of the fastest ways to share the model.

    Those that cannot be among them, by times below which none is, are not estimated.
    """
    bounds = sorted((at_least(each.work, question.machine), index) for index, each in enumerate(fitting))
    fastest: dict[tuple[object, ...], tuple[_Rank, int, Candidate]] = {}
    slowest = math.inf
    for bound, index in tracked("estimating layouts", bounds):
        if _rounded(bound) > slowest:
            break
        if _rounded(formula_at_least(fitting[index].work, question.machine)) > slowest:
            continue
        candidate = timed(fitting[index], question.machine, "formula")
        entry, way = (_rank(candidate), index, candidate), _way(candidate)
        if way not in fastest or entry[:2] < fastest[way][:2]:
            fastest[way] = entry
            if len(fastest) >= number:
                slowest = sorted(rank[0] for rank, _, _ in fastest.values())[number - 1]
    return [candidate for _, _, candidate in sorted(fastest.values(), key=lambda entry: entry[:2])[:number]]


def _simulated(candidates: list[Candidate], question: Question, number: int) -> tuple[list[Candidate], list[Candidate]]:
    """Return the `number` fastest by simulation, fastest first, and the others, simulated only where it was not clear
    that they are slower."""
    least = [timed(each, question.machine, "least") for each in candidates]
    ranked: list[tuple[_Rank, int]] = []
    for index in sorted(range(len(least)), key=lambda index: least[index].seconds):
        if len(ranked) >= number and _rounded(least[index].seconds) > ranked[number - 1][0][0]:
            break
        least[index] = timed(least[index], question.machine)
        ranked = sorted([*ranked, (_rank(least[index]), index)])
    best = [index for _, index in ranked[:number]]
    return [least[index] for index in best], [each for index, each in enumerate(least) if index not in best]


def timed(candidate: Candidate, machine: Machine, bubble: Bubble = "simulated") -> Candidate:
    """Return the candidate with its time."""
    return replace(candidate, time=time_of(candidate.work, machine, bubble=bubble), simulated=bubble == "simulated")


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
            resolved = _legal(question, choice)
            if not isinstance(resolved, Config):
                continue
            if name == "DDP" or resolved.layout.data_parallel_size * resolved.layout.context_parallel_size > 1:
                yield _candidate(choice, _work(question, resolved), name, recomputation)


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
        resolved = _legal(question, choice)
        if isinstance(resolved, Config):
            work = _work(question, resolved)
            others[flag_of(name)] = _candidate(choice, work, candidate.sharding, candidate.recomputation)
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
    recomputed = _Recomputations(question)
    rules = RULES  # until a configuration keeps them all: the rest of it is the same for all layouts
    portions = Portions(fused=question.machine.devices.is_gpu)
    every = list(layouts(values, question.world_size, question.machine.gpus_per_node))
    for layout in tracked("trying layouts", every):
        model_ranks = layout["tensor_model_parallel_size"] * layout["context_parallel_size"]
        data_ranks = question.world_size // (model_ranks * layout["pipeline_model_parallel_size"])
        if batch % data_ranks:
            continue
        alone = data_ranks * layout["context_parallel_size"] == 1
        seen = set()
        kinds = tuple(layout.get(axis, 1) > 1 for axis in _AXES)
        shapes = None
        works: dict[int, Workload] = {}  # of each micro batch, under the first sharding
        ways = dict(reversed(shardings(values).items()))
        if "FSDP2" in ways and (flags := hybrid(values, layout, question.world_size, question.machine.gpus_per_node)):
            ways["HSDP"] = flags
        for name, sharding in ways.items():
            if (alone and name in (*SHARDINGS, "HSDP") and name != "DDP") or BETTER.get(name) in seen:
                continue
            if (name, kinds) in refused:
                continue
            least, legal, smaller = 0, None, None
            for micro in micro_batches(values, batch // data_ranks):
                choice = {**layout, **({} if alone else sharding), "micro_batch_size": micro}
                resolved = _legal(question, choice, rules) if legal is None else _of_micro_batch(question, legal, micro)
                if resolved in RULES_OF_KINDS:
                    # With other sizes of the same axes it would be refused as well.
                    refused.add((name, kinds))
                    break
                if not isinstance(resolved, Config):
                    continue
                legal, shapes, rules = resolved, shapes or Shapes(resolved), RULES_OF_LAYOUTS
                work = smaller = _work(question, resolved, shapes, works.get(micro), smaller, portions)
                works.setdefault(micro, work)
                candidate, least = _with_least_recomputation(recomputed, choice, work, name, least)
                if candidate is None:
                    continue
                seen.add(name)
                yield candidate
                if candidate.memory.total > question.usable_bytes:
                    break  # larger ones need more


class _Recomputations:
    """The kinds of recomputation; whether they are legal does not depend on the layout, since they compute one layer
    anew at a time, nor on the micro batch, and on the sharding only by who computes the layers, or where one layer is
    applied several times."""

    def __init__(self, question: Question):
        self.facts, self.usable = question.facts, question.usable_bytes
        self.ways = list(recomputations(question.values).items())
        self._values = [tuple(way.items()) for _, way in self.ways]
        self._legal: dict[tuple[int, str, str], bool] = {}

    def of(self, config: Config, index: int) -> Config | None:
        """Return a configuration with the kind of this place; None where it is not legal."""
        if not self._values[index]:
            return config
        changed = replace(config, training=_changed(config.training, self._values[index]))
        scheme = scheme_of(config.layout).title if config.model.mtp_use_repeated_layer else ""
        key = index, config.model.transformer_impl, scheme
        if key not in self._legal:
            self._legal[key] = broken_rule(changed, self.facts, RULES_OF_RECOMPUTATION) is None
        return changed if self._legal[key] else None


@functools.lru_cache(maxsize=256)
def _changed(training: TrainingConfig, values: tuple[tuple[str, Any], ...]) -> TrainingConfig:
    # There are few, and each has a hundred values.
    return replace(training, **dict(values))


def _with_least_recomputation(
    recomputed: _Recomputations, choice: Choice, work: Workload, sharding: str, least: int
) -> tuple[Candidate | None, int]:
    """Return the candidate with the least recomputation that fits in memory, and the index of its kind in
    `recomputed.ways`. Where no kind fits, it is the candidate with the most recomputation that the rules allow; None
    where they allow no kind.

    Args:
        recomputed: the kinds of recomputation, the least first.
        work: the workload of the choice, without recomputation unless the user's flags give some.
        least: index of the first kind to try: with a smaller micro batch, the kinds before it did not fit.
    """
    fitting = None
    places = range(least, len(recomputed.ways))
    # Where the state alone does not fit, whatever is recomputed: the most recomputation that is legal.
    hopeless = not state_fits(work, recomputed.usable)
    for index in reversed(places) if hopeless else places:
        config = recomputed.of(work.config, index)
        if config is None:
            continue
        fitting, least = work if config is work.config else work.recomputing(config), index
        if hopeless or fits(fitting, recomputed.usable):
            break
    if fitting is None:
        return None, least
    stage, needed = worst_stage(fitting)
    name, recomputation = recomputed.ways[least]
    return Candidate({**choice, **recomputation}, fitting.config, sharding, name, stage, needed, fitting), least


def _legal(question: Question, choice: Choice, rules: Sequence[Rule] = RULES) -> Config | Rule:
    """Return the configuration that the choice resolves to, or one of the rules that it breaks."""
    config = resolved(question, choice)
    # Most that a search breaks are among the few first.
    first = broken_rule(config, question.facts, RULES_OF_MICRO_BATCHES)
    return first or broken_rule(config, question.facts, rules) or config


def _of_micro_batch(question: Question, config: Config, micro: int) -> Config | Rule:
    """Return the configuration, or a rule that it breaks, of a choice that differs from a legal configuration in its
    micro batch alone."""
    config = replace(config, training=_changed(config.training, (("micro_batch_size", micro),)))
    return broken_rule(config, question.facts, RULES_OF_MICRO_BATCHES) or config


def _work(
    question: Question,
    config: Config,
    shapes: Shapes | None = None,
    like: Workload | None = None,
    keeping: Workload | None = None,
    portions: Portions | None = None,
) -> Workload:
    fused = question.machine.devices.is_gpu
    return Workload(config, shapes or Shapes(config), fused=fused, like=like, keeping=keeping, portions=portions)


def resolved(question: Question, choice: Choice) -> Config:
    """Return the configuration that the question's values and a choice resolve to."""
    chosen = {name: value for name, value in choice.items() if value is not None}
    return resolve({**question.values, **chosen, "world_size": question.world_size}, question.facts)


def _candidate(choice: Choice, work: Workload, sharding: str, recomputation: str) -> Candidate:
    stage, needed = worst_stage(work)
    return Candidate(choice, work.config, sharding, recomputation, stage, needed, work)


def _way(candidate: Candidate) -> tuple[object, ...]:
    """Return a key that is equal for layouts that share the model in the same way: sizes and sharding. Of each way, the
    fastest layout is shown."""
    layout = candidate.config.layout
    sizes = layout.tensor_model_parallel_size, layout.context_parallel_size, layout.pipeline_model_parallel_size
    return (*sizes, layout.expert_model_parallel_size, candidate.sharding)


_Rank = tuple[float, tuple[int, ...]]


def _rank(candidate: Candidate) -> _Rank:
    return _rounded(candidate.seconds), candidate.simplicity


def _rounded(seconds: float) -> float:
    # A thousandth more or less is no difference.
    return float(f"{seconds:.4g}")


def _refusals(question: Question) -> list[str]:
    choice = next(layouts(question.values, question.world_size, question.machine.gpus_per_node), {})
    micro = question.values.get("micro_batch_size") or 1
    return problems(resolved(question, {**choice, "micro_batch_size": micro}), question.facts)
