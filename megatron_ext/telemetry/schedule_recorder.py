"""--record-schedule: when this rank runs which pass of the pipeline, and when it waits for others.

    recorder = ScheduleRecorder(device, pipeline_group, chunks)
    recorder.begin_step()
    schedule(forward_step_func=recorder.watched(forward_step), ...)   # with recorder.timers as the engine's timers
    recorder.end_step(iteration)
    recorder.steps                                                    # what was recorded

The engine says when a pass begins and ends by its own timers (`forward-compute`, `backward-compute`), which it asks
for in its configuration. Which microbatch and chunk a pass is of, the passes say themselves: the forward step counts
the batches of each chunk, and a hook on its result tells when its gradient comes back. Neither changes what is
computed. Waits are those of CommunicationClock.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_ext.device.device_protocol import Device
from megatron_ext.plan.timeline import COMMUNICATION, MESSAGES, Block, Pass
from megatron_ext.telemetry.communication_clock import IDLE, CommunicationClock
from megatron_ext.telemetry.schedule_record import RecordedStep

ForwardStep = Callable[[Any, torch.nn.Module], tuple[torch.Tensor, Any]]
"""megatron-core's forward_step_func: (batches, chunk) -> (output, loss function)."""

_PASSES = {"forward-compute": True, "backward-compute": False}


@dataclass
class _Running:
    """A pass, with the device's marks of its ends."""

    forward: bool
    begin: Any
    end: Any = None
    chunk: int = 0
    microbatch: int = 0
    bytes_after: int = 0
    half: str = ""


class ScheduleRecorder:
    """Records the steps of this rank between `begin_step` and `end_step`.

    Args:
        device: the device whose marks are taken.
        pipeline: the group whose messages are the pipeline's.
        chunks: the model chunks of this rank, as the engine gets them.
    """

    def __init__(self, device: Device, pipeline: ProcessGroup | None, chunks: Sequence[torch.nn.Module]):
        self.steps: list[RecordedStep] = []
        self._device = device
        self._clock = CommunicationClock(device, pipeline)
        self._chunk_of = {id(chunk): number for number, chunk in enumerate(chunks)}
        self._passes: list[_Running] = []
        self._seen = [0] * len(chunks)
        self._begin: Any = None
        self._first_began = self._began = self._late = 0.0

    def begin_step(self) -> None:
        """Wait until all ranks are here, so that their records have one beginning, and begin to record. Collective."""
        self._passes, self._seen = [], [0] * len(self._seen)
        self._device.synchronize()
        torch.distributed.barrier()
        self._device.synchronize()
        self._began = _first_of_this_machine(time.perf_counter())
        self._first_began = self._first_began or self._began
        self._clock.start()
        self._clock.begin_step()
        self._device.synchronize()
        self._begin, self._late = self._device.mark(), time.perf_counter() - self._began

    def end_step(self, iteration: int) -> None:
        """End the recording of a step, and wait until the device has done it.

        Args:
            iteration: number of the step, from 1.
        """
        end = self._device.mark()
        self._clock.end_step()
        self._clock.stop()
        self._device.synchronize()
        passes = tuple(
            Pass(each.forward, each.chunk, each.microbatch, self._second(each.begin), self._second(each.end), each.half)
            for each in self._passes
        )
        self.steps.append(
            RecordedStep(
                iteration,
                self._began - self._first_began,
                self._second(end),
                passes,
                self._blocks(),
                tuple((each.end, recorded.bytes_after) for each, recorded in zip(passes, self._passes, strict=True)),
            )
        )

    def abandon(self) -> None:
        """End a recording that is under way, without a result."""
        self._clock.stop()

    def watched(self, forward_step: ForwardStep) -> ForwardStep:
        """Return the same forward step, which says of each pass whose it is."""

        def step(batches: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            chunk = self._chunk_of[id(model)]
            microbatch = self._seen[chunk]
            self._seen[chunk] += 1
            self._name(chunk, microbatch)
            output, loss = forward_step(batches, model)
            output.register_hook(lambda _: self._name(chunk, microbatch))
            return output, loss

        step.recorder = self  # who splits backward passes says so  # pyright: ignore[reportFunctionMemberAccess]
        return step

    def name_half(self, half: str, chunk: int, microbatch: int) -> None:
        """Say of the last pass that it is a part of a backward pass."""
        self._name(chunk, microbatch)
        self._passes[-1].half = half

    def timers(self, others: Callable[..., Any] | None) -> "_Timers":
        """Return timers for the engine that record passes; `others` are those that it has otherwise."""
        return _Timers(self, others)

    def begin_pass(self, *, forward: bool) -> None:
        """Mark the beginning of a pass."""
        self._passes.append(_Running(forward, self._device.mark()))

    def end_pass(self) -> None:
        """Mark the end of the pass that runs."""
        self._passes[-1].end = self._device.mark()
        self._passes[-1].bytes_after = self._device.memory().allocated

    def _name(self, chunk: int, microbatch: int) -> None:
        self._passes[-1].chunk, self._passes[-1].microbatch = chunk, microbatch

    def _blocks(self) -> tuple[Block, ...]:
        return tuple(
            Block(MESSAGES if kind == IDLE else COMMUNICATION, self._second(begin), self._second(end))
            for kind, begin, end in self._clock.take_waits()
        )

    def _second(self, mark: Any) -> float:
        return self._late + self._device.seconds_between(self._begin, mark)


def _first_of_this_machine(now: float) -> float:
    """Return when the first rank of this machine was past the barrier. Collective.

    Ranks of one machine read one clock; those of several are as far apart as the barrier lets them go.
    """
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (_machine(), now))
    return min(when for machine, when in everyone if machine == _machine())


def _machine() -> str:
    """Return what no two machines have in common: the clock counts from their start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        return socket.gethostname()


class _Timers:
    """Timers in the call shape of the engine's, which tell the recorder of passes."""

    def __init__(self, recorder: ScheduleRecorder, others: Callable[..., Any] | None):
        self._recorder = recorder
        self._others = others

    def __call__(self, name: str, log_level: int | None = None) -> "_Timer":
        other = None if self._others is None else self._others(name, log_level)
        return _Timer(self._recorder if name in _PASSES else None, _PASSES.get(name, False), other)


class _Timer:
    """One timer of these: `start` and `stop` go on to the one that it stands for."""

    def __init__(self, recorder: ScheduleRecorder | None, forward: bool, other: Any):
        self._recorder, self._forward, self._other = recorder, forward, other

    def start(self, barrier: bool = False) -> None:
        if self._recorder is not None:
            self._recorder.begin_pass(forward=self._forward)
        if self._other is not None:
            self._other.start(barrier)

    def stop(self, barrier: bool = False) -> None:
        if self._other is not None:
            self._other.stop(barrier)
        if self._recorder is not None:
            self._recorder.end_pass()
