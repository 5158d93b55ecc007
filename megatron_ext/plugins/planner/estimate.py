"""How long a step takes, from first principles and a few constants fitted to published runs: an estimate, never a
measurement.

    compute     matrix products, attention, by their sizes (cost/kernel_times.py), and on CPU ranks the program's calls
    memory      everything but matrix products: activations are written once and read twice, gradients of weights are
                added up
    tp, cp, ep  traffic inside of layers that the program does not overlap with computation: of tensor parallelism's the
                backward pass hides the gathering for, and the summing next to, weight gradients (megatron-core's
                column-parallel layers); a ring of context parallelism hides behind attention; routing does not hide
    pp          sends between stages
    bubble      waiting time of the busiest stage, from the simulated schedule
    dp          data-parallel traffic that computation does not hide: with --overlap-grad-reduce the reduction has the
                backward pass of one microbatch to hide behind, with --overlap-param-gather the gathering one forward
                pass; FSDP2's has all of them
    optimizer   reading and writing its state, and on CPU ranks the calls of a step
    wait        waiting for the slowest rank, more with every doubling of the nodes

Traffic that runs next to computation slows it down: a share of it counts. CPU ranks that share cores (the flag
--processor-cores) have their share of computation, memory and links, and no bubble as long as others have work. Every
constant and its source stands in cost/hardware.py; docs/planner.md compares the sum with published runs. Input data,
logging and the unevenness of experts are not in it.
"""

import functools
import math
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Literal

from megatron_ext.config.schema import Config
from megatron_ext.cost.flops import repeated
from megatron_ext.cost.hardware import Machine
from megatron_ext.cost.kernel_times import with_calls
from megatron_ext.cost.stage_parameters import Shapes
from megatron_ext.cost.traffic import Term
from megatron_ext.cost.workload import Workload
from megatron_ext.parts.stack import Stack
from megatron_ext.plugins.planner.interconnect import seconds
from megatron_ext.plugins.planner.simulate import Times, by_formula, shortest, simulate

_IN_A_MICROBATCH = ("tp", "cp", "ep")
_Passes = tuple[float, float]
_BESIDE = ("hidden", "sent_bytes", "bubble_share", "hidden_by_axis")


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, on the busiest stage, by part."""

    compute: float
    memory: float
    tp: float
    cp: float
    ep: float
    pp: float
    bubble: float
    dp: float
    optimizer: float
    wait: float
    hidden: float
    """Seconds of traffic that runs next to computation; in no sum but for the share that slows computation down."""

    sent_bytes: float
    """Bytes that a rank of that stage sends."""

    bubble_share: float
    """Bubble as a share of the time of the pipeline alone."""

    hidden_by_axis: dict[str, float] = field(default_factory=dict)
    """Seconds of hidden traffic of tp, cp and dp."""

    @property
    def total(self) -> float:
        """Sum over the parts."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """Seconds by part."""
        return {name: getattr(self, name) for name in _PARTS}


_PARTS = tuple(part.name for part in fields(StepTime) if part.name not in _BESIDE)


@dataclass(frozen=True)
class _OfModel:
    """Seconds of one stage for one microbatch, as far as they do not depend on how data-parallel ranks share their
    state."""

    compute: list[tuple[float, float]]
    """Seconds of forward and backward pass, by chunk."""

    memory: list[tuple[float, float]]
    links: dict[str, float]
    """Seconds of both passes of all chunks that are not hidden, by axis."""

    hidden: dict[str, float]
    embedding: float
    """Seconds a step of summing the gradient of tied embeddings over the first and the last stage."""

    sent_bytes: float
    """Bytes of a step."""

    @functools.cached_property
    def passes(self) -> tuple[list[float], list[float]]:
        """Return seconds of forward and backward pass by chunk, with the traffic in them."""
        each = sum(self.links.values()) / len(self.compute)
        # Of a layer's traffic a backward pass sends at least as much as a forward pass.
        forward = [compute[0] + memory[0] + each / 2 for compute, memory in zip(self.compute, self.memory, strict=True)]
        backward = [
            compute[1] + memory[1] + each / 2 for compute, memory in zip(self.compute, self.memory, strict=True)
        ]
        return forward, backward


@dataclass(frozen=True)
class _Stage:
    """Seconds of one stage."""

    model: _OfModel
    data: list[tuple[Term, float]]
    optimizer: float
    sent_bytes: float


def step_time(config: Config, shapes: Shapes, machine: Machine) -> StepTime:
    """Estimate a step of a resolved and validated configuration."""
    return time_of(Workload(config, shapes, fused=machine.devices.is_gpu), machine)


Bubble = Literal["simulated", "formula", "least"]
"""Where the bubble comes from: the simulated schedule; its formula, (p-1)/(v m), for stages that are alike; or what no
schedule undercuts."""

_PIPELINES = {"simulated": simulate, "formula": by_formula, "least": shortest}


def time_of(work: Workload, machine: Machine, *, bubble: Bubble = "simulated") -> StepTime:
    """Estimate a step of a workload."""
    layout = work.config.layout
    estimate = _Estimate(work, machine)
    share = machine.processes_share(layout.world_size)
    # The formula asks for the longest stage alone; a simulation, and stages that share cores, for all of them.
    alike = work.shapes.heaviest() if bubble == "formula" and share == 1.0 else work.shapes.representatives()
    distinct = {stage: estimate.stage(stage) for stage in sorted(set(alike))}
    stages = [distinct[stage] for stage in alike]
    microbatches = estimate.microbatches
    passes = [stage.model.passes for stage in stages]
    forward, backward = [each[0] for each in passes], [each[1] for each in passes]
    pipeline, send = _PIPELINES[bubble], estimate.send()
    times = pipeline(work.schedule, forward, backward, send)
    at_once = pipeline(work.schedule, forward, backward, 0.0) if send else times
    busiest = max(distinct, key=lambda stage: sum(map(sum, passes[stage])))
    stage, model = stages[busiest], stages[busiest].model
    even, update = 1.0, stage.optimizer
    if share < 1.0:
        mean = microbatches * fmean(sum(map(sum, each)) for each in passes)
        even, update = mean / times.busiest, fmean(each.optimizer for each in stages)
        times, at_once = (_in_turn(each, share, mean) for each in (times, at_once))
    dp, hidden_dp = estimate.data_parallel(stage, sum(forward[busiest]), sum(backward[busiest]))
    hidden = {axis: microbatches * each for axis, each in model.hidden.items()} | {"dp": hidden_dp}
    parts = {
        "compute": even * microbatches * sum(map(sum, model.compute)),
        "memory": even * microbatches * sum(map(sum, model.memory)),
        **{axis: even * microbatches * model.links[axis] for axis in _IN_A_MICROBATCH},
        "pp": times.total - at_once.total + max(each.model.embedding for each in distinct.values()),
        "bubble": at_once.total - at_once.busiest,
        "dp": dp,
        "optimizer": update,
    }
    correction = machine.correction or 1.0
    parts["wait"] = sum(parts.values()) * _waiting(work, machine)
    return StepTime(
        **{part: seconds * correction for part, seconds in parts.items()},
        hidden=sum(hidden.values()),
        sent_bytes=stage.sent_bytes,
        bubble_share=times.bubble_share,
        hidden_by_axis=hidden,
    )


def _in_turn(times: Times, share: float, mean: float) -> Times:
    """Return the times of stages whose processes share cores: while one waits the others have its cores, so that all
    work takes its sum over the cores, or, where that is longer, as long as the passes that wait for each other take
    with a core for each process.

    Args:
        times: with every stage at its share of the cores all the time.
        mean: seconds that a stage works on average, at that share.
    """
    return Times(max(times.total * share, mean), mean)


def at_least(work: Workload, machine: Machine) -> float:
    """Return a lower bound in seconds of all estimates of this workload: matrix products, attention and operations
    bound by memory bandwidth, shared evenly by all stages, and their bubble."""
    layout = work.config.layout
    kernels = work.kernels(machine, fsdp=_divides_weights(work))
    of_all = work.once_for_portion(("all", id(kernels)), lambda: _Estimate(work, machine).of_a_microbatch())
    each = of_all / layout.pipeline_model_parallel_size
    passes = float(work.microbatches)
    if machine.processes_share(layout.world_size) == 1.0:
        passes += work.schedule.least_bubble
    # Sums in another order round differently.
    return passes * each * (1 + _waiting(work, machine)) * (machine.correction or 1.0) * (1 - 1e-9)


def formula_at_least(work: Workload, machine: Machine) -> float:
    """Return a lower bound in seconds of estimates by the bubble's formula: the first stage's passes, with the traffic
    in them. This bound is closer than `at_least`, and takes longer to compute."""
    if machine.processes_share(work.config.layout.world_size) < 1.0:
        return at_least(work, machine)
    forward, backward = _Estimate(work, machine).model(0).passes
    passes = work.microbatches + work.schedule.least_bubble
    seconds = passes * (sum(forward) + sum(backward)) * (1 + _waiting(work, machine)) * (machine.correction or 1.0)
    return seconds * (1 - 1e-9)


def _divides_weights(work: Workload) -> bool:
    return work.scheme.gradients


def _waiting(work: Workload, machine: Machine) -> float:
    """Return the share of a step by which waiting for the slowest makes it longer."""
    nodes = max(work.config.layout.world_size / machine.gpus_per_node, 1.0)
    return machine.constants.straggling * math.log2(nodes)


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one microbatch by stage and chunk, with the traffic in a pass."""

    forward: list[list[float]]
    backward: list[list[float]]
    forward_sent: list[list[float]]
    """Seconds of `forward` in collectives that nothing hides."""

    backward_sent: list[list[float]]
    send: float
    """Seconds of a message from one stage to the next."""


def pass_times(config: Config, shapes: Shapes, machine: Machine) -> PassTimes:
    """Return how long each pass of a resolved and validated configuration takes."""
    estimate = _Estimate(Workload(config, shapes, fused=machine.devices.is_gpu), machine)
    alike = shapes.representatives()
    distinct = {stage: estimate.stage(stage) for stage in sorted(set(alike))}
    stages = [distinct[stage].model for stage in alike]
    passes = [stage.passes for stage in stages]
    sent = [[sum(stage.links.values()) / len(stage.compute) / 2] * len(stage.compute) for stage in stages]
    return PassTimes([each[0] for each in passes], [each[1] for each in passes], sent, sent, estimate.send())


class _Estimate:
    """Estimates the seconds of the stages of one configuration, which share the values below."""

    def __init__(self, work: Workload, machine: Machine):
        self.work, self.machine = work, machine
        self.config, self.shapes, self.formulas = work.config, work.shapes, work.formulas
        self.constants = machine.constants
        self.microbatches = work.microbatches
        self.fsdp = _divides_weights(work)
        self.kernels = work.kernels(machine, fsdp=self.fsdp)
        self.bandwidth = self.kernels.bandwidth / self.constants.activations
        """Bytes a second of operations that are bound by memory bandwidth."""

    def stage(self, stage: int) -> _Stage:
        """Return the seconds of a stage."""
        model = self.model(stage)
        data = self._timed(self.work.sent_for_data(stage))
        sent_bytes = sum(term.bytes for term, _ in data) + model.sent_bytes
        return _Stage(model, data, self._optimizer(stage), sent_bytes)

    def model(self, stage: int) -> _OfModel:
        """Return the part of a stage's seconds that is the same for all sharding schemes with the same kernels."""
        return self.work.once(("seconds", id(self.kernels), stage), lambda: self._of_model(stage))

    def _of_model(self, stage: int) -> _OfModel:
        kinds, places = self.shapes.kinds_of_chunks(stage)
        of_kinds = [self._chunk(*kind) for kind in kinds]
        chunks = [of_kinds[index] for index in places]
        timed = self._timed(self.work.sent_for_model(stage))
        links, hidden = {}, {}
        for axis in _IN_A_MICROBATCH:
            all_of_it = sum(time for term, time in timed if term.axis == axis) / self.microbatches
            hidden[axis] = self._hidden(axis, all_of_it, stage)
            links[axis] = all_of_it - (1 - self.constants.contention) * hidden[axis]
        return _OfModel(
            compute=[compute for compute, _ in chunks],
            memory=[memory for _, memory in chunks],
            links=links,
            hidden=hidden,
            embedding=sum(time for term, time in timed if term.axis == "pp" and term.collective == "all-reduce"),
            sent_bytes=sum(term.bytes for term, _ in timed),
        )

    def _timed(self, terms: list[Term]) -> list[tuple[Term, float]]:
        return [(term, seconds(term, self.config.layout, self.machine)) for term in terms]

    def _optimizer(self, stage: int) -> float:
        """Return the seconds of an update: moments and master copy are read and written, gradients read, weights
        written."""
        dense, experts = self.shapes.parameters_of_stage(stage)
        state = [(dense, self.work.state), (experts, self.work.state_of_experts)]
        updated = sum(
            parameters * (2 * each.sizes[2] + (2 * each.gradients + each.weights) / each.shares[2])
            for parameters, each in state
        )
        moved = sum(
            2 * parameters * each.optimizer / each.shares[2] * (1.0 - each.on_device[2]) for parameters, each in state
        )
        of_host = moved / (self.constants.host_gb_s * 1e9)
        return updated / self.kernels.stream + of_host + self.kernels.calls_of_a_step

    def _hidden(self, axis: str, all_of_it: float, stage: int) -> float:
        """Return the seconds of a microbatch's traffic that run next to computation."""
        if axis == "tp":
            return all_of_it * self._hidden_share_of_tensor(stage)
        if axis == "cp" and set(self.config.layout.cp_comm_type) == {"p2p"}:
            core = self._parts(stage, "core")
            return min(all_of_it, core)
        return 0.0

    def _parts(self, stage: int, part: str) -> float:
        index = ("mixer", "core", "mlp").index(part)
        return sum(
            chunk.total(lambda kind: sum(self.kernels.layer(kind)[index])) for chunk in self.shapes.stacks[stage]
        )

    def _hidden_share_of_tensor(self, stage: int) -> float:
        """Return the share of tensor parallelism's traffic that megatron-core overlaps: of a block's five gathers and
        scatters (two forward, three backward) the backward pass' gathering of the input and scattering of its gradient;
        of its two sums, without sequence parallelism, the backward one. What recomputation repeats is not."""
        stacks = self.shapes.stacks[stage]
        blocks = 2 * sum(len(stack) for stack in stacks)
        if not blocks:
            return 0.0
        adds = sum(stack.total(lambda kind: kind.additions) for stack in stacks) / blocks
        again = [repeated(self.config, stack) for stack in stacks]
        repeats = sum(len(parts["mixer"]) + len(parts["mlp"]) for parts in again) / blocks
        if self.config.layout.sequence_parallel:
            return 2 / (3 + 2 * adds + 2 * repeats)
        return 1 / (1 + adds + repeats)

    def of_a_microbatch(self) -> float:
        """Return the seconds of all layers and the output layer, in matrix products, attention, and operations bound by
        memory bandwidth."""
        whole, formulas = self.shapes.whole, self.formulas
        kept = formulas.total(whole)
        moved = 3 * kept
        if self.config.training.recompute_num_layers in (None, 1):
            moved += 2 * max(kept - formulas.chunk(whole, first=False, last=False).layers, 0.0)
        return sum(self.layers(whole)) + sum(self.kernels.output()) + moved / self.bandwidth

    def _chunk(self, stack: Stack, first: bool, last: bool) -> tuple[_Passes, _Passes]:
        """Return the seconds of `_compute` and `_memory`, the same for chunks with the same contents."""
        return self.work.once_for_portion(
            ("chunk", id(self.kernels), stack.kinds, first, last),
            lambda: (self._compute(stack, last), self._memory(stack, first, last)),
        )

    def _compute(self, stack: Stack, last: bool) -> _Passes:
        """Return the seconds of matrix products and attention, forward and backward."""
        forward, backward = self.layers(stack)
        if last:
            ahead, back = self.kernels.output()
            forward, backward = forward + ahead, backward + back
        return with_calls((forward, backward), self.kernels.calls_of_a_pass)

    def layers(self, stack: Stack) -> _Passes:
        """Return the seconds of matrix products and attention of these layers alone, forward and backward;
        recomputation's repeated forward passes count as backward."""
        kernels = self.kernels
        forward = stack.total(lambda kind: sum(ahead for ahead, _ in kernels.layer(kind)))
        backward = stack.total(lambda kind: sum(back for _, back in kernels.layer(kind)))
        again = repeated(self.config, stack)
        for index, part in enumerate(("mixer", "core", "mlp")):
            backward += again[part].total(lambda kind, index=index: kernels.layer(kind)[index][0])
        return forward, backward

    def _memory(self, layers: Stack, first: bool, last: bool) -> _Passes:
        """Return the seconds of everything that is bound by the memory: norms, activations, additions."""
        kept = self.formulas.total(layers)
        kept_bytes = self.formulas.chunk(layers, first=first, last=last)
        # Recomputed activations are written and read once more.
        again = 2 * max(kept - kept_bytes.layers, 0.0)
        # The logits' few operations are long reads and writes.
        logits = (kept_bytes.loss + kept_bytes.logits) / self.kernels.stream
        return 2 * kept / self.bandwidth + 2 * logits, (kept + again) / self.bandwidth + logits

    def send(self) -> float:
        """Return the seconds of one message between two stages."""
        if self.work.schedule.stages == 1:
            return 0.0
        return seconds(Term("pp", "send", self.formulas.stream, ""), self.config.layout, self.machine)

    def data_parallel(self, stage: _Stage, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds of data-parallel traffic that no computation hides, and the seconds that computation
        hides."""
        layout = self.config.layout
        gathers = sum(time for term, time in stage.data if term.collective == "all-gather")
        sums = sum(time for _, time in stage.data) - gathers
        if self.fsdp:
            # Layer by layer, next to the layers before and after.
            hidden = min(gathers + sums, self.microbatches * (forward + backward))
        else:
            # Interleaved, a chunk is done with its gradients while the last group of microbatches passes the others.
            group = min(self.work.schedule.group, self.microbatches)
            hidden = min(sums, group * backward) if layout.overlap_grad_reduce else 0.0
            hidden += min(gathers, group * forward) if layout.overlap_param_gather else 0.0
        shown = self.constants.fsdp_shown if self.fsdp else self.constants.contention
        return gathers + sums - (1 - shown) * hidden, hidden
