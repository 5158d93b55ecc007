"""--profile: a trace of some steps, one Chrome trace per rank (open it in Perfetto or chrome://tracing)."""

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from megatron_ext.config.schema import Config
from megatron_ext.errors import StorageError


class StepProfiler:
    """Traces the steps from `first` up to, not including, `end`.

    Call `before_step` before each step; the trace is written when `end` is reached, or on leaving the context.
    """

    def __init__(self, path: Path, first: int, end: int):
        self.path = path
        self._steps = range(first, end)
        self._trace: profile | None = None

    @classmethod
    def from_config(cls, config: Config, rank: int) -> "StepProfiler":
        """The profiler that the flags ask for; without --profile, one that does nothing."""
        options = config.logging
        folder = config.checkpoint.save or options.tensorboard_dir or "."
        end = options.profile_step_end if options.profile else options.profile_step_start
        return cls(Path(folder) / "profile" / f"rank{rank}.json", options.profile_step_start, end)

    def before_step(self, iteration: int) -> None:
        """Start or end the trace, where the step `iteration` (from 1) asks for it.

        Raises:
            StorageError: the trace cannot be written.
        """
        if self._trace is None and iteration in self._steps:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._trace = profile(activities=activities)
            self._trace.start()
        elif self._trace is not None and iteration not in self._steps:
            self._write()

    def __enter__(self) -> "StepProfiler":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._trace is not None:
            self._write()

    def _write(self) -> None:
        trace, self._trace = self._trace, None
        assert trace is not None
        trace.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(self.path))
        except OSError as error:
            raise StorageError(f"cannot write the trace {self.path}: {error.strerror}. Leave out --profile.") from error
