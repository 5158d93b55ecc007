"""How long a step takes, from first principles and a few constants fitted to published runs: an estimate, never a
measurement.

    compute     matrix products and attention, each by its sizes (plan/kernels.py)
    memory      what is no matrix product: activations are written once and read twice, gradients of weights added up
    tp, cp, ep  traffic inside of layers that the program does not overlap with computation: of tensor parallelism's the
                backward pass hides the gathering for, and the summing next to, weight gradients (megatron-core's
                column-parallel layers); a ring of context parallelism hides behind attention; routing does not hide
    pp          sends between stages
    bubble      what the busiest stage waits, from the simulated schedule
    dp          what of the data-parallel traffic is not hidden: with --overlap-grad-reduce the reduction has the
                backward pass of one microbatch to hide behind, with --overlap-param-gather the gathering one forward
                pass; FSDP2's has all of them
    optimizer   reading and writing its state
    wait        waiting for the slowest rank, more with every doubling of the nodes

Traffic that runs next to computation slows it down: a share of it counts. CPU ranks that share cores (the flag
--processor-cores) have their share of computation, memory and links, and no bubble as long as others have work. Every
constant and its source stands in plan/constants.py; docs/planner.md compares the sum with published runs. Input data,
logging and the unevenness of experts are not in it.
"""

import math
from dataclasses import dataclass, field, fields
from statistics import fmean

from megatron_ext.config.layers import Stack, stack
from megatron_ext.config.schema import Config
from megatron_ext.plan.flops import repeated
from megatron_ext.plan.hardware import Machine
from megatron_ext.plan.links import seconds
from megatron_ext.plan.shapes import Shapes
from megatron_ext.plan.simulate import Times, by_formula, with_and_without
from megatron_ext.plan.traffic import Term
from megatron_ext.plan.workload import Workload

_IN_A_MICROBATCH = ("tp", "cp", "ep")
_DATA = ("dp", "edp", "between")
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
        names = [field.name for field in fields(self) if field.name not in _BESIDE]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class _Stage:
    """Seconds of one stage; per microbatch but for `data` and `optimizer`."""

    compute: list[tuple[float, float]]
    """Seconds of forward and backward pass, by chunk."""

    memory: list[tuple[float, float]]
    links: dict[str, float]
    """Seconds of both passes of all chunks that are not hidden, by axis."""

    hidden: dict[str, float]
    data: list[tuple[Term, float]]
    embedding: float
    """Seconds of summing the gradient of tied embeddings over the first and the last stage."""

    optimizer: float
    sent_bytes: float

    def passes(self) -> tuple[list[float], list[float]]:
        """Return seconds of forward and backward pass by chunk, with what is sent in them."""
        each = sum(self.links.values()) / len(self.compute)
        # Of a layer's traffic a backward pass sends at least as much as a forward pass.
        forward = [compute[0] + memory[0] + each / 2 for compute, memory in zip(self.compute, self.memory, strict=True)]
        backward = [
            compute[1] + memory[1] + each / 2 for compute, memory in zip(self.compute, self.memory, strict=True)
        ]
        return forward, backward


def step_time(config: Config, shapes: Shapes, machine: Machine) -> StepTime:
    """Estimate a step of a resolved and validated configuration."""
    return time_of(Workload(config, shapes, fused=machine.devices.is_gpu), machine)


def time_of(work: Workload, machine: Machine, *, quick: bool = False) -> StepTime:
    """Estimate a step of a workload.

    Args:
        quick: take the bubble from its formula, (p-1)/(v m), instead of a simulation: for stages that are alike.
    """
    layout = work.config.layout
    estimate = _Estimate(work, machine)
    share = machine.processes_share(layout.world_size)
    # The formula asks for the longest stage alone; a simulation, and stages that share cores, for all of them.
    alike = work.shapes.heaviest() if quick and share == 1.0 else work.shapes.representatives()
    distinct = {stage: estimate.stage(stage) for stage in sorted(set(alike))}
    stages = [distinct[stage] for stage in alike]
    microbatches = estimate.microbatches
    of_distinct = {stage: each.passes() for stage, each in distinct.items()}
    passes = [of_distinct[stage] for stage in alike]
    forward, backward = [each[0] for each in passes], [each[1] for each in passes]
    group, send = layout.microbatch_group_size, estimate.send()
    if quick:
        times, at_once = (by_formula(forward, backward, microbatches, group, delay) for delay in (send, 0.0))
    else:
        times, at_once = with_and_without(forward, backward, microbatches, group, send)
    busiest = max(distinct, key=lambda stage: sum(map(sum, passes[stage])))
    stage = stages[busiest]
    even, update = 1.0, stage.optimizer
    if share < 1.0:
        mean = microbatches * fmean(sum(map(sum, each)) for each in passes)
        even, update = mean / times.busiest, fmean(each.optimizer for each in stages)
        times, at_once = (_in_turn(each, share, mean) for each in (times, at_once))
    dp, hidden_dp = estimate.data_parallel(stage, sum(forward[busiest]), sum(backward[busiest]))
    hidden = {axis: microbatches * each for axis, each in stage.hidden.items()} | {"dp": hidden_dp}
    parts = {
        "compute": even * microbatches * sum(map(sum, stage.compute)),
        "memory": even * microbatches * sum(map(sum, stage.memory)),
        **{axis: even * microbatches * stage.links[axis] for axis in _IN_A_MICROBATCH},
        "pp": times.total - at_once.total + max(each.embedding for each in stages),
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
    """Return seconds below which no estimate of this workload is: products, attention and what is bound by the memory,
    shared evenly by all stages, and the bubble of that."""
    layout, estimate, whole = work.config.layout, _Estimate(work, machine), stack(work.config)
    computed = sum(estimate.layers(whole)) + sum(estimate.kernels.output())
    kept = work.formulas.total(whole)
    moved = 3 * kept
    if work.config.training.recompute_num_layers in (None, 1):
        moved += 2 * max(kept - work.formulas.chunk(whole, first=False, last=False).layers, 0.0)
    each = (computed + moved / estimate.bandwidth) / layout.pipeline_model_parallel_size
    passes = float(work.microbatches)
    if machine.processes_share(layout.world_size) == 1.0:
        passes += (layout.pipeline_model_parallel_size - 1) / layout.virtual_pipeline_model_parallel_size
    # Sums in another order round differently.
    return passes * each * (1 + _waiting(work, machine)) * (machine.correction or 1.0) * (1 - 1e-9)


def _waiting(work: Workload, machine: Machine) -> float:
    """Return the share of a step by which waiting for the slowest makes it longer."""
    nodes = max(work.config.layout.world_size / machine.gpus_per_node, 1.0)
    return machine.constants.straggling * math.log2(nodes)


@dataclass(frozen=True)
class PassTimes:
    """Seconds of one microbatch by stage and chunk, with what is sent in a pass."""

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
    stages = [distinct[stage] for stage in alike]
    passes = [stage.passes() for stage in stages]
    sent = [[sum(stage.links.values()) / len(stage.compute) / 2] * len(stage.compute) for stage in stages]
    return PassTimes([each[0] for each in passes], [each[1] for each in passes], sent, sent, estimate.send())


class _Estimate:
    """What all stages of one configuration share."""

    def __init__(self, work: Workload, machine: Machine):
        self.work, self.machine = work, machine
        self.config, self.shapes, self.formulas = work.config, work.shapes, work.formulas
        self.constants = machine.constants
        self.microbatches = work.microbatches
        self.fsdp = work.kind not in ("ddp", "optim")
        self.kernels = work.kernels(machine, fsdp=self.fsdp)
        self.bandwidth = self.kernels.bandwidth / self.constants.activations
        """Bytes a second of what is bound by the memory."""
        self._of_chunks: dict[tuple[object, bool, bool], tuple[_Passes, _Passes]] = {}

    def stage(self, stage: int) -> _Stage:
        """Return the seconds of a stage."""
        chunks = [self._chunk(stage, chunk) for chunk in range(len(self.shapes.counts[stage]))]
        terms = self.work.sent(stage)
        timed = [(term, seconds(term, self.config.layout, self.machine)) for term in terms]
        links, hidden = {}, {}
        for axis in _IN_A_MICROBATCH:
            all_of_it = sum(time for term, time in timed if term.axis == axis) / self.microbatches
            hidden[axis] = self._hidden(axis, all_of_it, stage)
            links[axis] = all_of_it - (1 - self.constants.contention) * hidden[axis]
        return _Stage(
            compute=[compute for compute, _ in chunks],
            memory=[memory for _, memory in chunks],
            links=links,
            hidden=hidden,
            data=[(term, time) for term, time in timed if term.axis in _DATA],
            embedding=sum(time for term, time in timed if term.axis == "pp" and term.collective == "all-reduce"),
            optimizer=self._optimizer(stage),
            sent_bytes=sum(term.bytes for term in terms),
        )

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
        return updated / self.kernels.stream + moved / (self.constants.host_gb_s * 1e9)

    def _hidden(self, axis: str, all_of_it: float, stage: int) -> float:
        """Return the seconds of a microbatch's traffic that run next to computation."""
        if axis == "tp":
            return all_of_it * self._hidden_share_of_tensor(stage)
        if axis == "cp" and set(self.config.layout.cp_comm_type) == {"p2p"}:
            core = self._parts(stage, "core")
            return min(all_of_it, core)
        return 0.0

    def _parts(self, stage: int, part: str) -> float:
        index = ("attention", "core", "mlp").index(part)
        return sum(held.total(lambda kind: sum(self.kernels.layer(kind)[index])) for held in self.shapes.stacks[stage])

    def _hidden_share_of_tensor(self, stage: int) -> float:
        """Return the share of tensor parallelism's traffic that megatron-core overlaps: of a block's five gathers and
        scatters (two forward, three backward) the backward pass' gathering of the input and scattering of its gradient;
        of its two sums, without sequence parallelism, the backward one. What recomputation repeats is not."""
        stacks = self.shapes.stacks[stage]
        blocks = 2 * sum(len(held) for held in stacks)
        if not blocks:
            return 0.0
        again = [repeated(self.config, held) for held in stacks]
        repeats = sum(len(parts["attention"]) + len(parts["mlp"]) for parts in again) / blocks
        if self.config.layout.sequence_parallel:
            return 2 / (5 + 2 * repeats)
        return 1 / (2 + repeats)

    def _chunk(self, stage: int, chunk: int) -> tuple[_Passes, _Passes]:
        """Return the seconds of `_compute` and `_memory`, the same for chunks with the same contents."""
        held = self.shapes.stacks[stage][chunk]
        first, last = self.shapes.is_first(stage, chunk), self.shapes.is_last(stage, chunk)
        key = held.kinds, first, last
        if key not in self._of_chunks:
            self._of_chunks[key] = self._compute(held, last), self._memory(held, first, last)
        return self._of_chunks[key]

    def _compute(self, held: Stack, last: bool) -> _Passes:
        """Return the seconds of matrix products and attention, forward and backward."""
        forward, backward = self.layers(held)
        if last:
            ahead, back = self.kernels.output()
            forward, backward = forward + ahead, backward + back
        return forward, backward

    def layers(self, held: Stack) -> _Passes:
        """Return the same of some layers alone, with what recomputation repeats of them."""
        kernels = self.kernels
        forward = held.total(lambda kind: sum(ahead for ahead, _ in kernels.layer(kind)))
        backward = held.total(lambda kind: sum(back for _, back in kernels.layer(kind)))
        again = repeated(self.config, held)
        for index, part in enumerate(("attention", "core", "mlp")):
            backward += again[part].total(lambda kind, index=index: kernels.layer(kind)[index][0])
        return forward, backward

    def _memory(self, layers: Stack, first: bool, last: bool) -> _Passes:
        """Return the seconds of everything that is bound by the memory: norms, activations, additions."""
        kept = self.formulas.total(layers)
        held = self.formulas.chunk(layers, first=first, last=last)
        # What is computed anew is written and read once more.
        again = 2 * max(kept - held.layers, 0.0)
        # The logits' few operations are long reads and writes.
        logits = (held.loss + held.logits) / self.kernels.stream
        return 2 * kept / self.bandwidth + 2 * logits, (kept + again) / self.bandwidth + logits

    def send(self) -> float:
        """Return the seconds of one message between two stages."""
        if self.config.layout.pipeline_model_parallel_size == 1:
            return 0.0
        return seconds(Term("pp", "send", self.formulas.stream, ""), self.config.layout, self.machine)

    def data_parallel(self, stage: _Stage, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds of data-parallel traffic that no computation hides, and of that which it hides."""
        layout = self.config.layout
        gathers = sum(time for term, time in stage.data if term.collective == "all-gather")
        sums = sum(time for _, time in stage.data) - gathers
        if self.fsdp:
            # Layer by layer, next to the layers before and after.
            hidden = min(gathers + sums, self.microbatches * (forward + backward))
        else:
            # Interleaved, a chunk is done with its gradients while the last group of microbatches passes the others.
            group = min(layout.microbatch_group_size, self.microbatches) if len(stage.compute) > 1 else 1
            hidden = min(sums, group * backward) if layout.overlap_grad_reduce else 0.0
            hidden += min(gathers, group * forward) if layout.overlap_param_gather else 0.0
        shown = self.constants.fsdp_shown if self.fsdp else self.constants.contention
        return gathers + sums - (1 - shown) * hidden, hidden
