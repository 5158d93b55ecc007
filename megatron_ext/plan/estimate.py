"""How long a step takes, from first principles: an estimate, never a measurement.

    compute     operations / (peak x efficiency), at least the time to read the weights from memory
    memory      what is no matrix product: activations are written once and read twice, gradients of weights added up
    tp, cp, ep  bytes sent / bandwidth of the link that their group has; nothing of it is hidden
    pp          sends between stages
    bubble      what the busiest stage waits, from the simulated schedule
    dp          what of the data-parallel traffic is not hidden: with --overlap-grad-reduce the reduction has the
                backward pass of one microbatch to hide behind, with --overlap-param-gather the gathering one forward
                pass; FSDP2's has all of them
    optimizer   reading and writing its state

The efficiencies (the shares of the peak that large matrix products reach, and collectives of the links' bandwidth) are
inputs. Latencies, kernel launches, input
data, logging and the unevenness of experts are not in it: layouts are to be compared, and the best few to be measured.
"""

from dataclasses import dataclass, fields

from megatron_ext.config.batch import num_microbatches
from megatron_ext.config.schema import Config
from megatron_ext.plan.activations import Activations
from megatron_ext.plan.flops import forward_flops
from megatron_ext.plan.hardware import Machine
from megatron_ext.plan.links import seconds
from megatron_ext.plan.shapes import Shapes
from megatron_ext.plan.simulate import by_formula, simulate
from megatron_ext.plan.state_bytes import sharding, state_bytes
from megatron_ext.plan.traffic import Term, sent

_IN_A_MICROBATCH = ("tp", "cp", "ep")
_DATA = ("dp", "edp", "between")
_BESIDE = ("hidden", "sent_bytes", "bubble_share")


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
    hidden: float
    """Seconds of data-parallel traffic that runs next to computation; in no sum."""

    sent_bytes: float
    """Bytes that a rank of that stage sends."""

    bubble_share: float
    """Bubble as a share of the time of the pipeline alone."""

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
    """Seconds of both passes of all chunks, by axis."""

    data: list[tuple[Term, float]]
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


def step_time(config: Config, shapes: Shapes, machine: Machine, *, quick: bool = False) -> StepTime:
    """Estimate a step of a resolved and validated configuration.

    Args:
        quick: take the bubble from its formula, (p-1)/(v m), instead of a simulation: for stages that are alike.
    """
    layout = config.layout
    alike = shapes.representatives()
    formulas = Activations(config, fused=machine.devices.is_gpu)
    distinct = {stage: _stage(config, shapes, formulas, stage, machine) for stage in sorted(set(alike))}
    stages = [distinct[stage] for stage in alike]
    microbatches = num_microbatches(config, config.training.global_batch_size)
    passes = [stage.passes() for stage in stages]
    forward, backward = [each[0] for each in passes], [each[1] for each in passes]
    group, send = layout.microbatch_group_size, _send(config, machine)
    simulated = by_formula if quick else simulate
    times = simulated(forward, backward, microbatches, group, send)
    at_once = simulated(forward, backward, microbatches, group, 0.0) if send else times
    busiest = max(range(len(stages)), key=lambda stage: sum(map(sum, passes[stage])))
    stage = stages[busiest]
    dp, hidden = _data_parallel(config, stage, sum(forward[busiest]), sum(backward[busiest]), microbatches)
    return StepTime(
        compute=microbatches * sum(map(sum, stage.compute)),
        memory=microbatches * sum(map(sum, stage.memory)),
        **{axis: microbatches * stage.links[axis] for axis in _IN_A_MICROBATCH},
        pp=times.total - at_once.total,
        bubble=at_once.total - at_once.busiest,
        dp=dp,
        optimizer=stage.optimizer,
        hidden=hidden,
        sent_bytes=stage.sent_bytes,
        bubble_share=times.bubble_share,
    )


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
    formulas = Activations(config, fused=machine.devices.is_gpu)
    alike = shapes.representatives()
    distinct = {stage: _stage(config, shapes, formulas, stage, machine) for stage in sorted(set(alike))}
    stages = [distinct[stage] for stage in alike]
    passes = [stage.passes() for stage in stages]
    sent = [[sum(stage.links.values()) / len(stage.compute) / 2] * len(stage.compute) for stage in stages]
    return PassTimes([each[0] for each in passes], [each[1] for each in passes], sent, sent, _send(config, machine))


def _stage(config: Config, shapes: Shapes, formulas: Activations, stage: int, machine: Machine) -> _Stage:
    microbatches = num_microbatches(config, config.training.global_batch_size)
    chunks = range(len(shapes.counts[stage]))
    terms = sent(config, stage, shapes)
    timed = [(term, seconds(term, config.layout, machine)) for term in terms]
    links = {axis: sum(time for term, time in timed if term.axis == axis) / microbatches for axis in _IN_A_MICROBATCH}
    dense, experts = shapes.parameters_of_stage(stage)
    # Moments and master copy are read and written, gradients read, weights written.
    state = [(dense, state_bytes(config)), (experts, state_bytes(config, expert=True))]
    updated = sum(
        parameters * (2 * each.sizes[2] + (each.gradients + each.weights) / each.shares[2])
        for parameters, each in state
    )
    return _Stage(
        compute=[_compute(config, shapes, stage, chunk, machine) for chunk in chunks],
        memory=[_memory(shapes, formulas, stage, chunk, machine) for chunk in chunks],
        links=links,
        data=[(term, time) for term, time in timed if term.axis in _DATA],
        optimizer=updated / (machine.devices.memory_bandwidth_gb_s * 1e9),
        sent_bytes=sum(term.bytes for term in terms),
    )


def _compute(config: Config, shapes: Shapes, stage: int, chunk: int, machine: Machine) -> tuple[float, float]:
    """Return the seconds of matrix products, forward and backward: by operations, but no faster than the weights are
    read."""
    rate = machine.devices.peak_flops(config.training) * machine.efficiency
    weights = config.training.params_bytes * sum(shapes.parameters_of_chunk(stage, chunk))
    read = weights / (machine.devices.memory_bandwidth_gb_s * 1e9)
    forward = forward_flops(config, shapes, stage, chunk)
    again = forward_flops(config, shapes, stage, chunk, again=True)
    return max(forward / rate, read), max((2 * forward + again) / rate, 2 * read)


def _memory(shapes: Shapes, formulas: Activations, stage: int, chunk: int, machine: Machine) -> tuple[float, float]:
    """Return the seconds of everything that is bound by the memory: norms, activations, additions, adding up of
    gradients."""
    layers, last = shapes.stacks[stage][chunk], shapes.is_last(stage, chunk)
    kept = formulas.total(layers)
    held = formulas.chunk(layers, first=shapes.is_first(stage, chunk), last=last)
    written = kept + held.loss + held.logits
    # What is computed anew is written and read once more.
    again = 2 * max(kept - held.layers, 0.0)
    width = formulas.width
    # A matrix' gradient is written, and read to be added to the sum, which is read and written.
    added = sum(shapes.parameters_of_chunk(stage, chunk)) * (2 * width + 8)
    bandwidth = machine.devices.memory_bandwidth_gb_s * 1e9
    return 2 * written / bandwidth, (written + again + added) / bandwidth


def _send(config: Config, machine: Machine) -> float:
    """Return the seconds of one message between two stages."""
    layout = config.layout
    if layout.pipeline_model_parallel_size == 1:
        return 0.0
    size = Activations(config, fused=True).stream
    return seconds(Term("pp", "send", size, ""), layout, machine)


def _data_parallel(
    config: Config, stage: _Stage, forward: float, backward: float, microbatches: int
) -> tuple[float, float]:
    """Return the seconds of data-parallel traffic that no computation hides, and of that which it hides."""
    layout = config.layout
    gathers = sum(time for term, time in stage.data if term.collective == "all-gather")
    sums = sum(time for _, time in stage.data) - gathers
    if sharding(config) not in ("ddp", "optim"):
        # Layer by layer, next to the layers before and after.
        hidden = min(gathers + sums, microbatches * (forward + backward))
    else:
        hidden = min(sums, backward) if layout.overlap_grad_reduce else 0.0
        hidden += min(gathers, forward) if layout.overlap_param_gather else 0.0
    return gathers + sums - hidden, hidden
