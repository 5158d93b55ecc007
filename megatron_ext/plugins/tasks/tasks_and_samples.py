"""Evaluates tasks (--eval-tasks) and writes samples of text (--sample-interval) in the middle of training.

Both run on all ranks in the run's own layout, with the weights as they are, and change nothing that the training
follows from: no random numbers are drawn, and no data is read but the tasks' own.
"""

from collections.abc import Sequence

from megatron_ext.config.derived.batch_size import evaluation_batch
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.eval_tasks import EvalTask, read_eval_tasks
from megatron_ext.plugins.tasks.generation import check_prompts, generate
from megatron_ext.plugins.tasks.inference_model import Model
from megatron_ext.plugins.tasks.sampling import Sampling
from megatron_ext.plugins.tasks.task_files import read_prompts
from megatron_ext.plugins.tasks.tasks import evaluate_prepared, prepare_task
from megatron_ext.telemetry.metrics import Sample, SampleMetrics, TaskMetrics
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer
from megatron_ext.train.datasets import tokenizer_of_run
from megatron_ext.train.run import Run
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer


def model_of(run: Run, tokenizer: Tokenizer) -> Model:
    """Return the model of a run, as inference sees it."""
    return Model(run.config, run.device, run.groups, run.p2p, run.chunks, tokenizer, run.gathered_parameters)


class Tasks(Callback):
    """Evaluates the tasks every `interval` steps, and after the last step of the run.

    Raises:
        DataError, StorageError: a file of a task cannot be used. That is found out before the first step.
    """

    def __init__(self, model: Model, tasks: Sequence[EvalTask], interval: int):
        self.model, self.interval = model, interval
        self._tasks = {task.name: prepare_task(model, task) for task in tasks}
        self._evaluated_at: int | None = None

    def on_start(self, trainer: Trainer) -> None:
        # A finished run that is started again has these results.
        self._evaluated_at = trainer.run.state.iteration

    def ends_before_next(self, trainer: Trainer) -> bool:
        return self._is_due(trainer.position.iteration)

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        if self._is_due(trainer.run.state.iteration):
            self._evaluate(trainer)

    def _is_due(self, iteration: int) -> bool:
        return bool(self.interval) and iteration % self.interval == 0

    def on_end(self, trainer: Trainer) -> None:
        if trainer.finished and self._evaluated_at != trainer.run.state.iteration:
            self._evaluate(trainer)

    def _evaluate(self, trainer: Trainer) -> None:
        state, rows = trainer.run.state, evaluation_batch(trainer.run.config)[1]
        self._evaluated_at = state.iteration
        results = {name: evaluate_prepared(self.model, task, rows) for name, task in self._tasks.items()}
        trainer.report_evaluation(
            TaskMetrics(iteration=state.iteration, consumed_samples=state.consumed_samples, tasks=results)
        )


class Samples(Callback):
    """Goes on from the prompts every `interval` steps, with the most likely token each time.

    Raises:
        ConfigurationError: there is no prompt, or one is too long. That is found out before the first step.
    """

    def __init__(self, model: Model, prompts: Sequence[str], interval: int, tokens: int):
        assert model.tokenizer is not None
        self.model, self.prompts, self.interval = model, prompts, interval
        self._ids = [model.tokenizer.encode(prompt) or [model.tokenizer.eod] for prompt in prompts]
        self._sampling = Sampling(max_new_tokens=tokens)
        if not prompts:
            raise ConfigurationError("--sample-prompts has no prompt; give one a line, or leave out --sample-interval")
        check_prompts(model, self._ids, self._sampling)

    def ends_before_next(self, trainer: Trainer) -> bool:
        return trainer.position.iteration % self.interval == 0

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        state = trainer.run.state
        if state.iteration % self.interval:
            return
        made = generate(self.model, self._ids, self._sampling, rows=evaluation_batch(trainer.run.config)[1])
        samples = tuple(
            Sample(prompt=prompt, text=one.text or "") for prompt, one in zip(self.prompts, made, strict=True)
        )
        trainer.report_evaluation(
            SampleMetrics(iteration=state.iteration, consumed_samples=state.consumed_samples, samples=samples)
        )


def callbacks_of(run: Run) -> list[Callback]:
    """Return the callbacks that --eval-tasks and --sample-interval ask for."""
    training = run.config.training
    model = model_of(run, tokenizer_of_run(run.config))
    made: list[Callback] = []
    if training.eval_tasks is not None:
        made.append(Tasks(model, read_eval_tasks(training.eval_tasks), training.eval_interval))
    if training.sample_interval is not None:
        assert training.sample_prompts is not None, "validated"
        prompts = read_prompts(training.sample_prompts)
        made.append(Samples(model, prompts, training.sample_interval, training.sample_tokens))
    return made
