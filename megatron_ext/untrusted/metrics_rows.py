"""Reads metrics files, and other files of JSON lines with an iteration, from untrusted sources.

    for row in read_rows("out/metrics.jsonl"):
        row["iteration"]

A line that is no such row is named in a warning and left out; text after the last newline was torn by a kill.
"""

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.errors import DataError
from megatron_ext.terminal import warn
from megatron_ext.untrusted.text import ExcessiveError, TextError, load_json
from megatron_ext.untrusted.values import Check, fields, integer, items, mapping, number, or_null, text

MOST_BYTES = 1 << 30
"""Most bytes of a metrics file whose rows are read; a row of ours has some 700."""

_MOST_OF_A_LINE = 1 << 22
_NAMED = 10  # lines that are named, each in a warning
_MOST_RANKS = 1 << 20
_MOST_LAYERS, _MOST_EXPERTS = 10_000, 65_536

HAS_ITERATION = fields({"iteration": integer()})
"""Takes every row of a file that is cut at the iteration of a checkpoint."""

_COUNTS = (
    "train_iters consumed_samples consumed_tokens global_batch_size skipped_iterations nan_iterations "
    "peak_memory_bytes allocated_bytes reserved_bytes world_size num_zeros resumed_at"
)
_NUMBERS = (
    "grad_norm learning_rate weight_decay loss_scale elapsed_ms cpu_ms tokens_per_second tflops_per_gpu mfu "
    "params_norm load_balancing_loss seq_load_balancing_loss global_load_balancing_loss z_loss "
    "max_attention_logit dropped_share indexer_loss"
)
_OF_EXPERTS = "max_over_mean entropy dropped router_z"
_ROW = fields(
    {"iteration": integer()},
    {
        **dict.fromkeys(_COUNTS.split(), or_null(integer())),
        **dict.fromkeys(_NUMBERS.split(), or_null(number)),
        **dict.fromkeys(("lm_loss", "validation_loss", "test_loss"), number),
        "validation_loss_by_source": mapping(number),
        "time_shares": or_null(mapping(number)),
        "slowest_rank": or_null(
            fields({"rank": integer(), "ratio": number, "slow": items(integer(), most=_MOST_RANKS)})
        ),
        "expert_load": items(
            fields(
                {"layer": integer(), **dict.fromkeys(_OF_EXPERTS.split(), number), "without_tokens": integer()},
                {"bias": items(number, most=2)},
            ),
            most=_MOST_LAYERS,
        ),
        "expert_tokens": items(items(integer(), most=_MOST_EXPERTS), most=_MOST_LAYERS),
        "consumed_by_source": or_null(mapping(mapping(number), most=100_000)),
        "tasks": mapping(mapping(number)),
        "samples": items(fields({"prompt": text(1 << 20), "text": text(1 << 20)}), most=1000),
    },
)
_STEP = fields({"consumed_tokens": integer()})


class Line(NamedTuple):
    """One line of a file: its place in bytes, and the row that it is; None where it is none."""

    begin: int
    end: int
    row: dict[str, Any] | None


def check_row(row: Any) -> None:
    """Check a row of a metrics file; raises TextError."""
    _ROW(row)
    if "lm_loss" in row:
        _STEP(row)


def read_rows(
    path: str | Path, check: Check = check_row, *, pipe: bool = False, strict: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics file, first to last.

    Args:
        check: takes a row, or raises TextError.
        pipe: whether it may be a pipe, which is waited for: where a person has named it.
        strict: whether a line that is no row is an error.
    Raises:
        DataError: no line is a row, or, if strict, one is none; names file and line. Or the file is too large.
        FileNotFoundError: there is no such file.
    """
    for line in read_lines(path, check, most=MOST_BYTES, pipe=pipe, strict=strict):
        if line.row is not None:
            yield line.row


def read_lines(
    path: str | Path, check: Check, *, most: int = sys.maxsize, pipe: bool = False, strict: bool = False
) -> Iterator[Line]:
    """Yield every whole line of a file; those that `check` does not take are named in warnings.

    Args:
        most: bytes of the file.
    Raises: as `read_rows`.
    """
    if not pipe and not stat.S_ISREG(os.stat(path).st_mode):
        raise DataError(f"{path} is no regular file; nothing was read")
    end = number = bad = 0
    first = ""
    with open(path, "rb") as file:
        while True:
            begin, number = end, number + 1
            content = file.readline(_MOST_OF_A_LINE + 1)
            end += len(content)
            row, problem = _row(content, check)
            while content and not content.endswith(b"\n"):  # nothing is kept of a line that is too long
                content = file.readline(_MOST_OF_A_LINE)
                end += len(content)
            if not content:
                break
            if end > most:
                raise DataError(f"{path} has more than {most:,} bytes; give the last rows of it")
            if problem:
                first, bad = first or f"{path}:{number}: not a row of a metrics file ({problem})", bad + 1
                if strict:
                    raise DataError(f"{first}. Remove that line, and start again.")
                if bad <= _NAMED:
                    warn(f"{path}:{number}: not a row of a metrics file ({problem}); it is left out")
            yield Line(begin, end, row)
    if bad > _NAMED:
        warn(f"{path}: {bad - _NAMED} more lines are no rows and are left out")
    if bad and bad == number - 1:
        raise DataError(f"{first}, and neither is any other line. Move the file away, and start again.")


def _row(content: bytes, check: Check) -> tuple[dict[str, Any] | None, str]:
    """Return the row of a line, or why it is none."""
    try:
        if len(content) > _MOST_OF_A_LINE:
            raise ExcessiveError(f"it has more than {_MOST_OF_A_LINE:,} bytes")
        row = load_json(content)
        check(row)
    except TextError as error:
        return None, str(error)[:300]
    return row, ""
