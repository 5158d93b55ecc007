"""The metrics file: JSON lines, one object per logged step and per evaluation.

Floats are written by `repr`, so they read back to the same double. NaN and infinities are written as `NaN`,
`Infinity` and `-Infinity`: strict JSON has no such numbers, but Python's `json` reads them back as they were.

    with MetricsFile("out/metrics.jsonl", loaded_iteration=0) as file:
        file.write(step_metrics)
"""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from megatron_ext.durable import keep, only_files
from megatron_ext.errors import StorageError
from megatron_ext.telemetry.metrics import Metrics, as_row
from megatron_ext.terminal import warn
from megatron_ext.untrusted.metrics_rows import HAS_ITERATION, read_lines


class MetricsFile:
    """Appends rows and flushes each, so that a killed process loses at most the row that it was writing."""

    def __init__(self, path: str | Path, loaded_iteration: int, flag: str = "--metrics-file"):
        """Open the file to go on after `loaded_iteration` (0: afresh); later rows, and a torn last one, are removed.

        Args:
            path: path of the file; its folder is made.
            loaded_iteration: iteration of the checkpoint that the run goes on from.
            flag: the flag that names the file, for error texts.

        Raises:
            DataError: no line but a torn last one is a row.
            StorageError: the folder or the file cannot be made.
        """
        self.path, self._flag = Path(path), flag
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            drop_after(self.path, loaded_iteration)
            self._file = _appending(self.path)
        except OSError as error:
            raise _storage_error("open", self.path, self._flag, error) from error

    def write(self, metrics: Metrics) -> None:
        """Write the row of a step or an evaluation; raises as `write_row`."""
        self.write_row(as_row(metrics))

    def write_row(self, row: Mapping[str, Any]) -> None:
        """Write one row, which has an iteration. If the file was removed, a new one is begun.

        Raises:
            StorageError: the file cannot be written (disk full, a vanished mount).
        """
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._begin_anew()
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        except OSError as error:
            raise _storage_error("write", self.path, self._flag, error) from error

    def _begin_anew(self) -> None:
        warn(f"{self.path} was removed while this job writes to it: it is begun anew, without the rows so far")
        self._file.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _appending(self.path)

    def close(self) -> None:
        """Close the file."""
        # Every row was flushed; only one whose write has failed, and raised, is still pending.
        with contextlib.suppress(OSError):
            self._file.close()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


def drop_after(path: Path, iteration: int) -> None:
    """Remove the rows past `iteration` and a torn last line; lines that are no rows stay, for they are not ours.

    Raises:
        DataError: no line is a row, so that it is another file than a metrics file.
    """
    if path.is_file():
        lines = read_lines(path, HAS_ITERATION)
        keep(path, ((line.begin, line.end) for line in lines if line.row is None or line.row["iteration"] <= iteration))


def _appending(path: Path) -> IO[str]:
    return open(path, "a", encoding="utf-8", opener=only_files)


def _storage_error(action: str, path: Path, flag: str, error: OSError) -> StorageError:
    return StorageError(
        f"cannot {action} {path}: {error.strerror}. Free space or fix the permission there, "
        f"or give another place with {flag}."
    )
