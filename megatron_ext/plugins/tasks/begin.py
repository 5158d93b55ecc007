"""Begins --eval-tasks and --sample-interval of a run: nothing else is imported by a run without them."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.eval_tasks import look_at_eval_tasks

if TYPE_CHECKING:
    from megatron_ext.train.run import Run
    from megatron_ext.train.trainer import Callback


def facts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the problems of the list of tasks, and the files of tasks that are missing."""
    path = values.get("eval_tasks")
    if path is None or not Path(path).exists():
        return {}
    try:
        _, problems, missing = look_at_eval_tasks(path)
    except ConfigurationError as error:
        return {"eval_tasks_problems": tuple(error.problems)}
    return {"eval_tasks_problems": tuple(problems), "missing_task_files": tuple(missing)}


def callbacks(run: "Run") -> "list[Callback]":
    """Return the callbacks that --eval-tasks and --sample-interval ask for."""
    training = run.config.training
    if training.eval_tasks is None and training.sample_interval is None:
        return []
    from megatron_ext.plugins.tasks.tasks_and_samples import callbacks_of

    return callbacks_of(run)


FACTS, CALLBACKS = (facts,), (callbacks,)
