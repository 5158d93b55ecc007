"""Writes the last numbers of a run as text for Prometheus.

    megatron-ext prometheus checkpoints/quickstart
    megatron-ext prometheus checkpoints/quickstart --output /var/lib/node_exporter/pretrain.prom --every 15

Reads metrics.jsonl in the folder (or the file that --metrics-file named) and exit.json next to it. --output replaces
the file as a whole, as node_exporter's textfile collector needs it; with --every it is written again after so many
seconds, until the run has ended: it waits for the run's first row, and goes on after an end after which a launcher may
start the ranks again. Without --output the text is printed.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.commandline import ToolParser, write_output
from megatron_ext.errors import ConfigurationError, StoppedBySignal
from megatron_ext.terminal import note, say
from megatron_ext.untrusted.metrics_rows import read_rows
from megatron_ext.untrusted.text import load_json, read_file

_ENDS = {0, ConfigurationError.exit_code, StoppedBySignal.exit_code}
"""Exit codes after which no launcher starts the ranks again with success."""

_GAUGES = {
    "iteration": "Steps done.",
    "train_iters": "Steps planned.",
    "consumed_tokens": "Tokens read in training.",
    "lm_loss": "Training loss, in nats per token.",
    "validation_loss": "Loss on the validation data, in nats per token.",
    "grad_norm": "Norm of the gradients before clipping.",
    "learning_rate": "Learning rate.",
    "tokens_per_second": "Tokens per second of the whole job.",
    "elapsed_ms": "Milliseconds of a step.",
    "mfu": "Model FLOPs utilization, from 0 to 1.",
    "peak_memory_bytes": "Largest memory allocated on a device, in bytes.",
    "skipped_iterations": "Steps that the loss scaler skipped since the last logged step.",
    "nan_iterations": "Steps without a number as their loss since the last logged step.",
    "world_size": "Number of ranks.",
}
"""Fields of rows that are shown -> what they are."""


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Write the last numbers of a run as text for Prometheus.", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's --save folder, or its metrics file")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to replace; default standard output")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="with --output: write again, until the run ends")
    options = parser.parse_args(argv)
    if options.every is not None and (options.output is None or options.every <= 0):
        raise ConfigurationError(f"--every {options.every:g} needs --output FILE and a number of seconds above 0")
    if options.every is not None and not metrics_of(options.run).exists():
        note(f"{options.run} has no metrics yet: they are waited for")
    while True:
        metrics = metrics_of(options.run)
        if options.every is not None and not metrics.exists():
            time.sleep(options.every)
            continue
        code = exit_code(metrics.parent / "exit.json")
        text = exposition(metrics, code)
        if options.output is None:
            say(text.rstrip("\n"))
            return 0
        write_output("--output", options.output, text)
        if options.every is None or code in _ENDS:
            return 0
        time.sleep(options.every)


def metrics_of(run: Path) -> Path:
    """Return the metrics file of a run's folder, or the file itself."""
    return run / "metrics.jsonl" if run.is_dir() else run


def exposition(metrics: Path, code: int | None) -> str:
    """Return the gauges of the last rows of a metrics file, in Prometheus' text format.

    Args:
        metrics: the file.
        code: exit code of the run; None while it runs.
    Raises:
        ConfigurationError: there is no such file.
        DataError: the file is none of metrics.
    """
    last: dict[str, Any] = {}
    failures = 0
    try:
        for row in read_rows(metrics):
            last |= {name: value for name, value in row.items() if name in _GAUGES and value is not None}
            failures += "save_failure" in row
    except FileNotFoundError:
        raise ConfigurationError(
            f"{metrics} does not exist; name the folder that --save wrote, or the file of --metrics-file"
        ) from None
    return "".join(_lines(last, failures, code))


def _lines(last: Mapping[str, Any], failures: int, code: int | None) -> Iterator[str]:
    values = {name: (text, last[name]) for name, text in _GAUGES.items() if name in last}
    values["save_failures"] = ("Saves that failed (--save-failure warn).", failures)
    if code is not None:
        values["exit_code"] = ("Exit code of the run, once it has ended.", code)
    for name, (text, value) in values.items():
        full = f"pretrain_{name}"
        yield f"# HELP {full} {text}\n# TYPE {full} gauge\n{full} {_number(value)}\n"


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(repr(value), repr(value))


def exit_code(record: Path) -> int | None:
    """Return the exit code that the record of a run's end has; None where there is none."""
    try:
        content = load_json(read_file(record, 1 << 20))
        return content["code"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
