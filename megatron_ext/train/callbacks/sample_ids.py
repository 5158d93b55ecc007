"""--log-sample-ids writes which samples each step used, one JSON line a step.

    {"iteration": 3, "sources": ["data/a", "data/b"], "samples": [[0, 17], [1, 4]]}

Step 3 used window 17 of the first source and window 4 of the second. The number counts windows of seq_length tokens
through all epochs of the source, in the stream that the sample order cuts (`data.samples.SampleWindow`).
"""

from megatron_ext.telemetry.metrics_file import MetricsFile
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


class SampleIds(Callback):
    """Writes the samples of each step, on the last rank; the lines past the loaded iteration are removed first."""

    def __init__(self, path: str, run: Run):
        self._file = MetricsFile(path, run.state.iteration, "--log-sample-ids") if run.is_last_rank else None

    def ends_before_next(self, trainer: Trainer) -> bool:
        return False

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._file is None:
            return
        samples, end = trainer.run.loaders.samples, trainer.run.state.consumed_samples
        skipped = trainer.run.loaders.skipped
        used = [index for index in range(end - result.global_batch_size, end) if index not in skipped]
        places = [samples.window_at(index) for index in used]
        self._file.write_row(
            {
                "iteration": trainer.run.state.iteration,
                "sources": [source.name for source in samples.sources],
                "samples": [[window.source, window.number] for window in places],
            }
        )

    def on_end(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
