"""Reads the rows of parquet and Arrow files, a few at a time. This needs the package pyarrow.

An Arrow file is a stream of record batches, as the library datasets keeps them on the disk.
"""

import io
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_ext.errors import DataError
from megatron_ext.plugins.prepare.inputs import InputFile, import_for, open_bytes
from megatron_ext.plugins.prepare.long_texts import check_utf8
from megatron_ext.tokenizer.tokenizer_protocol import LONG

_ROWS = 256  # read at a time
_BATCH_BYTES = 1 << 24  # of the columns that are read: fewer rows where they are long
_MOST_BYTES = 1 << 26  # that a batch can take at worst, if the longest rows of a row group stand together
_BLOCK_BYTES = 1 << 20  # of text in what is handed on, or one row


def row_count(file: InputFile) -> int:
    """Return the number of rows of the whole file, or 0 where one would have to fetch it all. Raises as `read_rows`
    does."""
    if file.kind == "arrow":
        return 0 if file.remote is not None else sum(batch.num_rows for batch in _arrow_batches(file))
    return _open(file).metadata.num_rows


def read_rows(
    file: InputFile, columns: Sequence[str], start: int = 0, needs_all_columns: bool = True
) -> Iterator[tuple[list[dict[str, Any]], int, int]]:
    """Read the columns, or where not all are needed those that the file has, from row `start` (from 0) on.

    Yields:
        Rows (column -> value; a long text as UTF-8), the number of the first of them, and about how many bytes they
        take.

    Raises:
        ConfigurationError: pyarrow is not installed.
        DataError: the file is damaged or lacks a column.
    """
    if file.kind == "arrow":
        yield from _read_arrow(file, columns, start, needs_all_columns)
        return
    table = _open(file)
    columns = _present(file, table.schema_arrow.names, columns, needs_all_columns)
    row = 0
    for group in range(table.num_row_groups):
        group_end = row + table.metadata.row_group(group).num_rows
        if group_end <= start:
            row = group_end
            continue
        try:
            at_once = _rows_at_once(table.metadata.row_group(group), columns)
            for batch in table.iter_batches(at_once, row_groups=[group], columns=list(columns)):
                skipped = max(0, start - row)
                row += batch.num_rows
                if skipped < batch.num_rows:
                    yield from _blocks(batch.slice(skipped), row - batch.num_rows + skipped)
        except (ValueError, OSError) as error:
            raise DataError(f"{file.path}: damaged after row {row}: {error}. Copy the file again") from error


def _present(file: InputFile, names: Sequence[str], columns: Sequence[str], needs_all_columns: bool) -> list[str]:
    missing = [column for column in columns if column not in names]
    present = [column for column in columns if column in names]
    if missing and (needs_all_columns or not present):
        raise DataError(f'{file.path}: no column "{missing[0]}"; the columns are {names} (--json-keys)')
    return present


def _read_arrow(
    file: InputFile, columns: Sequence[str], start: int, needs_all_columns: bool
) -> Iterator[tuple[list[dict[str, Any]], int, int]]:
    row = 0
    for batch in _arrow_batches(file):
        first, row = row, row + batch.num_rows
        chosen = batch.select(_present(file, batch.schema.names, columns, needs_all_columns))
        for begin in range(max(0, start - first), batch.num_rows, _ROWS):
            yield from _blocks(chosen.slice(begin, _ROWS), first + begin)


def _arrow_batches(file: InputFile) -> Iterator[Any]:
    """Yield the record batches; a local file is memory-mapped, so that only the parts in use are read."""
    pyarrow = import_for("pyarrow", "pyarrow", file.path)
    ipc = import_for("pyarrow.ipc", "pyarrow", file.path)
    row = 0
    try:
        source = _source(file) or pyarrow.memory_map(file.path)
        with ipc.open_stream(source) as reader:
            for batch in reader:
                yield batch
                row += batch.num_rows
    except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{file.path}: not a stream of Arrow, or damaged after row {row}: {error}") from error


def _rows_at_once(group: Any, columns: Sequence[str]) -> int:
    """Return the number of rows whose values are about _BATCH_BYTES by the mean of the row group, and never more than
    _MOST_BYTES or a row.

    A row group does not say how long its rows are, only how many bytes all have together. As they are stored, no value
    has more than that; but many rows can be a reference to one value, or to the beginning of the one before.
    """
    parts = [part for part in map(group.column, range(group.num_columns)) if part.path_in_schema in columns]
    size = max(1, sum(part.total_uncompressed_size for part in parts))
    rows = max(1, min(_ROWS, _BATCH_BYTES * group.num_rows // size))
    if all(_STORED_AS_THEY_ARE.issuperset(part.encodings) for part in parts):
        return rows if size <= _MOST_BYTES else 1
    return max(1, min(rows, _MOST_BYTES // size))


_STORED_AS_THEY_ARE = {"PLAIN", "RLE", "BIT_PACKED", "DELTA_LENGTH_BYTE_ARRAY"}


def _blocks(batch: Any, first: int) -> Iterator[tuple[list[dict[str, Any]], int, int]]:
    """Yield the rows of a batch, about _BLOCK_BYTES of them at a time."""
    if batch.nbytes <= _BLOCK_BYTES:
        yield batch.to_pylist(), first, batch.nbytes
        return
    rows: list[dict[str, Any]] = []
    size = 0
    for number in range(batch.num_rows):
        one = batch.slice(number, 1)
        rows.append({name: _value(one.column(name)) for name in one.schema.names})
        size += one.nbytes
        if size > _BLOCK_BYTES or number == batch.num_rows - 1:
            yield rows, first + number + 1 - len(rows), size
            rows, size = [], 0


def _value(column: Any) -> Any:
    """Return the value of a column of one row."""
    value = column[0]
    is_text = "string" in str(value.type)
    if is_text and value.is_valid and column.nbytes > LONG:
        text = value.as_buffer().to_pybytes()
        check_utf8(text)
        return text
    return value.as_py()


def _source(file: InputFile) -> io.BufferedReader | None:
    """Return a stream over a file of a store, each of whose reads is as long as is asked; None for a local file."""
    return None if file.remote is None else io.BufferedReader(open_bytes(file), 1 << 16)


def _open(file: InputFile) -> Any:
    parquet = import_for("pyarrow.parquet", "pyarrow", file.path)
    try:
        # A buffer: otherwise a column's pages of a whole row group are read into memory at once.
        return parquet.ParquetFile(_source(file) or file.path, buffer_size=1 << 20)
    except (ValueError, OSError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise DataError(f"{file.path}: not a readable parquet file: {error}") from error
