"""Evaluate a checkpoint on local files, on the ranks of any layout: `megatron-ext tasks --task LAMBADA --load ckpt`.

    megatron-ext tasks --task PERPLEXITY --valid-data wiki.txt --overlapping-eval 32 --load ckpt
    megatron-ext tasks --task LAMBADA --valid-data lambada_test.jsonl --strict-lambada --load ckpt --results out.json
    torchrun --nproc-per-node 4 -m megatron_ext tasks --task MULTIPLE_CHOICE --valid-data questions.jsonl --load ckpt \\
        --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    megatron-ext tasks --eval-tasks tasks.yaml --load-hf Llama-3.2-1B
    megatron-ext tasks --task LM_EVAL --lm-eval-tasks arc_easy --load ckpt

What the model is, the checkpoint says; --tensor-model-parallel-size, --device, --micro-batch-size (sequences at once on
a replica, default 8), --seq-length and the other flags of `megatron-ext pretrain` choose layout, precision and length.
Every item of a file counts once, whatever the layout.
"""

import argparse
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.commandline import ToolParser
from megatron_ext.config.parse.options import options_by_flag
from megatron_ext.config.parse.settings import Settings, words_of
from megatron_ext.durable import replacing
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.tasks.eval_tasks import KINDS, EvalTask, read_eval_tasks
from megatron_ext.registry import with_own
from megatron_ext.terminal import say

if TYPE_CHECKING:
    from megatron_ext.plugins.tasks.inference_model import Model

_HARNESS = "LM_EVAL"
_ROWS = ("--micro-batch-size", "8")


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    rank, results = _evaluated(argv)
    if rank == 0:
        say(table(results))
    return 0


def evaluate(
    settings: Settings = None, /, *, families: Sequence[Any] = (), **flags: Any
) -> dict[str, dict[str, float]]:
    """Evaluate a trained model on local files, in this process, and return task -> metric -> value.

        evaluate(load="run", task="PERPLEXITY", valid_data="wiki.txt")["perplexity"]["word_perplexity"]

    Settings are the flags of `megatron-ext tasks` without their hyphens: `task` (PERPLEXITY, LAMBADA, MULTIPLE_CHOICE,
    LM_EVAL) with `valid_data`, or `eval_tasks`, the path of a YAML file; and `load`, the folder of checkpoints, or
    `load_hf`, the folder of a Hugging Face model. Under torchrun every rank calls it, and all get the same results but
    for LM_EVAL's, which the first rank has.

    Args:
        settings: a dict of settings by the flags' names, or flags as on a command line.
        families: families of Hugging Face models beyond the program's, as `pretrain` takes them.
        flags: settings as keywords, which win over `settings`.
    Raises:
        ConfigurationError: the settings cannot work; the text names every problem.
        DataError: a file of a task is present but wrong.
    """
    with with_own("families", families):
        return _evaluated(words_of(settings, flags, _parser().knows, ["families"]))[1]


def _evaluated(argv: list[str]) -> tuple[int, dict[str, dict[str, float]]]:
    """Evaluate as a command line says, write --results, and return this rank's number and the results."""
    options, flags = _parser().parse_with_flags(argv, options_by_flag())
    tasks = _tasks(options)
    from megatron_ext.plugins.tasks.trained_model import configure_trained, trained_model

    with trained_model(configure_trained([*_ROWS, *flags])) as model:
        results = _harness(model, options) if options.task == _HARNESS else _own(model, tasks)
        if model.rank == 0 and options.results:
            _write(options.results, model, results)
        return model.rank, results


def _parser() -> ToolParser:
    parser = ToolParser(
        "Evaluate a checkpoint. Further flags: the model and layout, as of megatron-ext pretrain.",
        __doc__,
        command="tasks",
    )
    parser.add_argument("--task", type=_task_name, choices=(*KINDS, _HARNESS), help="what to ask of the model")
    parser.add_argument("--valid-data", nargs="+", default=[], metavar="FILE", help="files of the task")
    parser.add_argument("--overlapping-eval", type=int, metavar="N", help="PERPLEXITY: tokens by which windows advance")
    parser.add_argument("--strict-lambada", action="store_true", help="LAMBADA: the last word, not the last token")
    parser.add_argument("--eval-tasks", metavar="FILE", help="YAML list of tasks, in place of --task")
    parser.add_argument("--results", metavar="FILE", help="write the results there, as JSON")
    parser.add_argument("--lm-eval-tasks", nargs="+", default=[], metavar="NAME", help="LM_EVAL: the harness's tasks")
    parser.add_argument("--include-path", metavar="DIR", help="LM_EVAL: folder with tasks of your own")
    parser.add_argument("--num-fewshot", type=int, help="LM_EVAL: examples before a question; default each task's own")
    parser.add_argument("--limit", type=int, help="LM_EVAL: questions of each task; default all")
    return parser


def _task_name(text: str) -> str:
    """Return the name of a task; of Megatron's WIKITEXT103 it is said what measures the same."""
    if text == "WIKITEXT103":
        raise argparse.ArgumentTypeError(
            "WIKITEXT103 is --task PERPLEXITY here, whose word_perplexity counts the words of the text as it is"
        )
    return text


def _tasks(options: Any) -> list[EvalTask]:
    """Return the tasks that the options ask for, checked before anything is loaded."""
    if (options.task is None) == (options.eval_tasks is None):
        raise ConfigurationError("give --task with its files, or --eval-tasks FILE: one of them")
    if options.eval_tasks is not None:
        return read_eval_tasks(options.eval_tasks)
    if options.task == _HARNESS:
        if not importlib.util.find_spec("lm_eval"):
            raise ConfigurationError("--task LM_EVAL needs lm-evaluation-harness: pip install lm_eval")
        if not options.lm_eval_tasks:
            raise ConfigurationError("--task LM_EVAL needs --lm-eval-tasks, names of tasks of the harness")
        return []
    task = EvalTask(
        options.task.lower(), options.task, tuple(options.valid_data), options.overlapping_eval, options.strict_lambada
    )
    if problems := [*task.problems(), *task.missing()]:
        raise ConfigurationError([f"--task {options.task}: {problem}" for problem in problems])
    return [task]


def _own(model: "Model", tasks: list[EvalTask]) -> dict[str, dict[str, float]]:
    from megatron_ext.plugins.tasks.tasks import evaluate_task

    return {task.name: evaluate_task(model, task, model.config.training.micro_batch_size) for task in tasks}


def _harness(model: "Model", options: Any) -> dict[str, dict[str, float]]:
    from megatron_ext.plugins.tasks.leader import Leader, follow

    if model.rank != 0:
        follow(model)
        return {}
    from megatron_ext.plugins.tasks.harness import evaluate

    leader = Leader(model)
    try:
        rows = model.config.training.micro_batch_size
        return evaluate(leader, options.lm_eval_tasks, rows, options.include_path, options.num_fewshot, options.limit)
    finally:
        leader.close()


def table(results: dict[str, dict[str, float]]) -> str:
    """Return the results as lines: task, metric, value."""
    rows = [(task, name, _shown(name, value)) for task, metrics in results.items() for name, value in metrics.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)] if rows else []
    return "\n".join(f"{task:<{widths[0]}}  {name:<{widths[1]}}  {value:>{widths[2]}}" for task, name, value in rows)


def _shown(name: str, value: float) -> str:
    if name.endswith("perplexity"):  # a loss of six digits leaves no more in its exponential
        return f"{value:,.2f}" if value < 1e6 else f"{value:.3e}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.6f}"


def _write(path: str, model: "Model", results: dict[str, dict[str, float]]) -> None:
    flags = model.config.checkpoint
    layout = model.config.layout
    content = {
        "model": flags.load or flags.load_hf,
        "iteration": model.iteration,
        "world_size": layout.world_size,
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "precision": model.config.training.params_dtype,
        "seq_length": model.config.model.seq_length,
        "results": results,
    }
    with replacing(Path(path)) as file:
        file.write(json.dumps(content, indent=2).encode() + b"\n")
