"""Rows of parquet files, a few at a time. Needs the package pyarrow."""

from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ext.data.inputs import InputFile, import_for
from megatron_ext.errors import DataError

_ROWS = 256  # read at a time


def row_count(file: InputFile) -> int:
    """Rows of the whole file. Raises as `read_rows` does."""
    return _open(file).metadata.num_rows


def read_rows(
    file: InputFile, columns: Sequence[str], start: int = 0
) -> Iterator[tuple[list[dict[str, Any]], int, int]]:
    """Read the columns from row `start` (from 0) on.

    Yields:
        Rows (column -> value), the number of the first of them, and about how many bytes they take.

    Raises:
        ConfigurationError: pyarrow is not installed.
        DataError: the file is damaged or lacks a column.
    """
    table = _open(file)
    names = table.schema_arrow.names
    missing = [column for column in columns if column not in names]
    if missing:
        raise DataError(f'{file.path}: no column "{missing[0]}"; the columns are {names} (--json-keys)')
    row = 0
    for group in range(table.num_row_groups):
        group_end = row + table.metadata.row_group(group).num_rows
        if group_end <= start:
            row = group_end
            continue
        try:
            for batch in table.iter_batches(_ROWS, row_groups=[group], columns=list(columns)):
                skipped = max(0, start - row)
                row += batch.num_rows
                if skipped < batch.num_rows:
                    wanted = batch.slice(skipped)
                    yield wanted.to_pylist(), row - wanted.num_rows, wanted.nbytes
        except (ValueError, OSError) as error:
            raise DataError(f"{file.path}: damaged after row {row}: {error}. Copy the file again") from error


def _open(file: InputFile) -> Any:
    parquet = import_for("pyarrow.parquet", "pyarrow", file.path)
    try:
        return parquet.ParquetFile(file.path)
    except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{file.path}: not a readable parquet file: {error}") from error
