"""--profile records some steps with a profiler, Nsight Systems (`NsightCapture`) or torch's own (`TorchTrace`).

profiler = StepProfiler.from_config(config, rank, device)
for iteration in ...:
    profiler.before_step(iteration)
    ...
profiler.finish()
"""

from pathlib import Path
from typing import Protocol

from torch.cuda import nvtx
from torch.profiler import ExecutionTraceObserver, profile, record_function

from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.durable import only_files
from megatron_ext.errors import StorageError
from megatron_ext.telemetry.timers import OpenRange


class Tracer(Protocol):
    """Records from `start` to `stop`, once."""

    def start(self) -> None:
        """Begin recording."""

    def stop(self) -> None:
        """End recording."""


class TorchTrace:
    """Records with torch's profiler: a Chrome trace (open it in Perfetto or chrome://tracing).

    Args:
        path: path of the trace; with `chakra`, the execution trace lies next to it as `<name>.chakra.json`.
    """

    def __init__(self, path: Path, *, shapes: bool = False, callstack: bool = False, chakra: bool = False):
        self.path = path
        self._shapes = shapes
        self._callstack = callstack
        self._chakra = chakra
        self._trace: profile | None = None
        self._observer: ExecutionTraceObserver | None = None

    def start(self) -> None:
        """Begin recording.

        Raises:
            StorageError: the folder cannot be made.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            open(self.path, "ab", opener=only_files).close()
        except OSError as error:
            raise self._cannot_write(error) from error
        if self._chakra:
            self._observer = ExecutionTraceObserver().register_callback(str(self.path.with_suffix(".chakra.json")))
        self._trace = profile(
            record_shapes=self._shapes, with_stack=self._callstack, execution_trace_observer=self._observer
        )
        self._trace.start()

    def stop(self) -> None:
        """End recording and write the trace.

        Raises:
            StorageError: the trace cannot be written.
        """
        trace, self._trace = self._trace, None
        assert trace is not None, "the trace was not started"
        trace.stop()
        if self._observer is not None:
            self._observer.unregister_callback()  # which writes the end of its file
        try:
            trace.export_chrome_trace(str(self.path))
        except OSError as error:
            raise self._cannot_write(error) from error

    def _cannot_write(self, error: OSError) -> StorageError:
        return StorageError(f"cannot write the trace {self.path}: {error.strerror}. Leave out --profile.")


def open_range(config: Config) -> OpenRange | None:
    """Return a function that opens a named range in the trace; None without --profile."""
    if not config.profiling.profile:
        return None
    return record_function if config.profiling.use_pytorch_profiler else nvtx.range


class NsightCapture:
    """Marks the range that `nsys profile --capture-range=cudaProfilerApi` records; without nsys around the program,
    nothing is recorded."""

    def __init__(self, device: Device, *, shapes: bool, ranges: bool):
        self._device = device
        self._shapes = shapes
        self._ranges = ranges

    def start(self) -> None:
        """Begin the range."""
        self._device.start_capture(shapes=self._shapes, ranges=self._ranges)

    def stop(self) -> None:
        """End the range."""
        self._device.stop_capture()


class StepProfiler:
    """Traces the steps from `first` up to, not including, `end`; with no tracer it does nothing.

    Call `before_step` before each step; the trace ends when `end` is reached, or with `finish`.
    """

    def __init__(self, tracer: Tracer | None, first: int, end: int):
        self.tracer = tracer
        self._steps = range(first, end)
        self._running = False

    @classmethod
    def from_config(cls, config: Config, rank: int, device: Device) -> "StepProfiler":
        """Return the profiler that the flags ask of this rank."""
        options = config.profiling
        tracer: Tracer | None = None
        if options.profile and rank in (options.profile_ranks or [rank]):
            folder = config.checkpoint.save or config.logging.tensorboard_dir or "."
            tracer = (
                TorchTrace(
                    Path(folder) / "profile" / f"rank{rank}.json",
                    shapes=options.pytorch_profiler_collect_shapes,
                    callstack=options.pytorch_profiler_collect_callstack,
                    chakra=options.pytorch_profiler_collect_chakra,
                )
                if options.use_pytorch_profiler
                else NsightCapture(device, shapes=options.record_shapes, ranges=options.nvtx_ranges)
            )
        return cls(tracer, options.profile_step_start, options.profile_step_end)

    def before_step(self, iteration: int) -> None:
        """Start or end the trace, where the step `iteration` (from 1) asks for it.

        Raises:
            StorageError: the trace cannot be written.
        """
        if self.tracer is not None and self._running != (iteration in self._steps):
            self._running = not self._running
            self.tracer.start() if self._running else self.tracer.stop()

    def finish(self) -> None:
        """End a trace that is under way.

        Raises:
            StorageError: the trace cannot be written.
        """
        if self.tracer is not None and self._running:
            self._running = False
            self.tracer.stop()
