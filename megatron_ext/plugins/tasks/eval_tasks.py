"""Reads the list of tasks to evaluate a model on: --eval-tasks, a YAML file.

lambada:
  task: LAMBADA
  valid_data: data/lambada.jsonl
  strict_lambada: true
wiki:
  task: PERPLEXITY
  valid_data: [data/wiki.txt]
  overlapping_eval: 32
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigurationError

KINDS = ("PERPLEXITY", "LAMBADA", "MULTIPLE_CHOICE")
_KEYS = ("task", "valid_data", "overlapping_eval", "strict_lambada")


@dataclass(frozen=True)
class EvalTask:
    """One task: its kind and settings, and its files of texts or questions."""

    name: str
    """Name in logs and results."""
    kind: str
    """One of `KINDS`."""
    valid_data: tuple[str, ...]
    overlapping_eval: int | None = None
    """Tokens by which windows of a long text advance; None for as many as a window has."""
    strict_lambada: bool = False
    """Whether the whole last word counts, rather than the last token."""

    def problems(self) -> list[str]:
        """Return why the task cannot be done, its files apart; empty where it can."""
        texts = []
        if self.kind not in KINDS:
            texts.append(f"{self.name}: task is {self.kind}; choose {', '.join(KINDS)}")
        if not self.valid_data:
            texts.append(f"{self.name}: no valid_data; name at least one file")
        if self.overlapping_eval is not None and self.overlapping_eval < 1:
            texts.append(f"{self.name}: overlapping_eval is {self.overlapping_eval}; give at least 1")
        return texts

    def missing(self) -> list[str]:
        """Return a message for each of the task's files that does not exist."""
        return [f"{self.name}: {path} is no file" for path in self.valid_data if not Path(path).is_file()]


def read_eval_tasks(path: str) -> list[EvalTask]:
    """Return the tasks of a file, in its order.

    Raises:
        ConfigurationError: the file cannot be read, or a task in it cannot be done; all problems are named.
    """
    tasks, problems, missing = look_at_eval_tasks(path)
    if problems or missing:
        raise ConfigurationError([*problems, *missing])
    return tasks


def look_at_eval_tasks(path: str) -> tuple[list[EvalTask], list[str], list[str]]:
    """Return the tasks of a file that can be understood, the problems of the list, and the files named by the tasks
    that do not exist.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    from megatron_ext.config.parse.config_file import read_yaml  # with PyYAML, for which --dry-run does not wait

    tasks, problems = [], []
    content = read_yaml(path, "--eval-tasks")
    for name, values in content.items():
        try:
            tasks.append(_task(name, values))
        except ValueError as error:
            problems.append(f"{name}: {error}")
            continue
        problems += tasks[-1].problems()
    if not content:
        problems.append("it names no task; give lines such as `lambada: {task: LAMBADA, valid_data: lambada.jsonl}`")
    missing = [problem for task in tasks for problem in task.missing()]
    where = f"--eval-tasks {path}: "
    return tasks, [where + problem for problem in problems], [where + problem for problem in missing]


def _task(name: str, values: Any) -> EvalTask:
    if not isinstance(values, Mapping):
        raise ValueError("give its task and valid_data, as `lambada: {task: LAMBADA, valid_data: lambada.jsonl}`")
    unknown = [str(key) for key in values if key not in _KEYS]
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; known are {', '.join(_KEYS)}")
    files, stride, strict = values.get("valid_data", []), values.get("overlapping_eval"), values.get("strict_lambada")
    files = [files] if isinstance(files, str) else files
    if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
        raise ValueError("valid_data is no path, nor a list of paths")
    if stride is not None and type(stride) is not int:
        raise ValueError(f"overlapping_eval is {stride!r}, no whole number")
    if not isinstance(strict, bool | None):
        raise ValueError(f"strict_lambada is {strict!r}; give true or false")
    return EvalTask(name, str(values.get("task")), tuple(files), stride, bool(strict))
