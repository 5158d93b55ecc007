"""Writes the last numbers of a run as text for Prometheus.

    megatron-ext prometheus checkpoints/quickstart
    megatron-ext prometheus checkpoints/quickstart --output /var/lib/node_exporter/pretrain.prom --every 15
    megatron-ext prometheus metrics.jsonl --save checkpoints/quickstart --output pretrain.prom --every 15

Reads metrics.jsonl in the folder and exit.json next to it; a file that --metrics-file named may lie elsewhere, and
--save is then the folder of exit.json. --output replaces the file as a whole, as node_exporter's textfile collector
needs it; with --every it is written again after so many seconds, until the run has ended: it waits for the run's first
row, does not take the end of an earlier run for this one's, and goes on after an end after which a launcher may start
the ranks again, which is every exit code but 0, 64 and 75. Without --output the text is printed.
"""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.commandline import ToolParser, write_output
from megatron_ext.errors import ConfigurationError, StoppedBySignal
from megatron_ext.resilience import exit_record
from megatron_ext.terminal import note, say
from megatron_ext.untrusted.metrics_rows import read_rows

_ENDS = {0, ConfigurationError.exit_code, StoppedBySignal.exit_code}
"""Exit codes after which no launcher starts the ranks again with success."""

_GAUGES = {
    "iteration": "The last step that was logged.",
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
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder of exit.json; default that of the metrics")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file to replace; default standard output")
    parser.add_argument("--every", type=float, metavar="SECONDS", help="with --output: write again, until the run ends")
    options = parser.parse_args(argv)
    if options.every is not None and (options.output is None or options.every <= 0):
        raise ConfigurationError(f"--every {options.every:g} needs --output FILE and a number of seconds above 0")
    if options.every is None:
        metrics = metrics_of(options.run)
        text = exposition(metrics, _code(metrics, options.save))
        if options.output is None:
            say(text.rstrip("\n"))
        else:
            write_output("--output", options.output, text)
        return 0
    _watch(options.run, options.save, options.output, options.every)
    return 0


def _watch(run: Path, save: Path | None, output: Path, every: float) -> None:
    """Write the file every so many seconds, until the run has ended."""
    begun, told = time.time(), False
    while True:
        metrics = metrics_of(run)
        code = _code(metrics, save, since=begun)
        if metrics.exists():
            write_output("--output", output, exposition(metrics, code))
        elif not told:
            told = True
            note(
                f"{metrics} does not exist: it is waited for; where the run has --metrics-file FILE, give FILE, and "
                "the run's own folder by --save"
            )
        if code in _ENDS:
            return
        time.sleep(every)


def _code(metrics: Path, save: Path | None, since: float = 0.0) -> int | None:
    """Return the exit code of the run since a time; None where it has not ended since then."""
    record = exit_record.read(metrics.parent if save is None else save, since=since)
    return None if record is None else record["code"]


def metrics_of(run: Path) -> Path:
    """Return the metrics file of a run's folder, or the file itself: what ends with .jsonl, or is a file."""
    return run if run.suffix == ".jsonl" or run.is_file() else run / "metrics.jsonl"


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
