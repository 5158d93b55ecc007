"""Reads the files that models are evaluated on and asked about: JSON lines and plain text, of bounded size."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.errors import DataError, StorageError
from megatron_ext.untrusted.text import TextError, load_json, read_file

_MOST = 1 << 32
"""Bytes of the largest file that is read."""


def read_text(path: str | Path) -> str:
    """Return the text of a file.

    Raises:
        DataError: it is larger than any that is read here, or not UTF-8.
        StorageError: it cannot be read.
    """
    try:
        return read_file(path, _MOST).decode("utf-8-sig")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror}; give the path of a file that can be read") from error
    except (TextError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {error}; give a text in UTF-8") from error


def read_items(path: str | Path, needed: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSON-lines file, each with its place for messages; empty lines are passed over.

    Args:
        needed: keys that every object must have.
    Raises:
        DataError, StorageError: as `read_text`, or a line is no such object.
    """
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            item = load_json(line.encode())
        except TextError as error:
            raise DataError(f"{where}: {error}; a line must be one JSON object") from error
        missing = [key for key in needed if not isinstance(item, dict) or key not in item]
        if missing:
            raise DataError(f"{where}: no {', '.join(missing)}; a line must be an object with {', '.join(needed)}")
        yield where, item


def text_of(where: str, item: dict[str, Any], key: str) -> str:
    """Return a string of an object. Raises DataError where it is none."""
    value = item[key]
    if not isinstance(value, str):
        raise DataError(f"{where}: {key} is {type(value).__name__}, not a text")
    return value


def read_documents(path: str | Path) -> list[str]:
    """Return the texts of a file: "text" of every line of .json and .jsonl, the whole of any other. Raises as
    `read_items`."""
    if Path(path).suffix in (".json", ".jsonl"):
        return [text_of(where, item, "text") for where, item in read_items(path, ["text"])]
    return [read_text(path)]


def read_prompts(path: str | Path) -> list[str]:
    """Return the prompts of a file: "prompt" of every line of .json and .jsonl, else every line. Raises as
    `read_items`."""
    if Path(path).suffix in (".json", ".jsonl"):
        return [text_of(where, item, "prompt") for where, item in read_items(path, ["prompt"])]
    return lines_of(read_text(path))


def lines_of(text: str) -> list[str]:
    """Return the lines of a text that are not empty; line feeds alone end them, not what else Unicode calls a line."""
    return [line for line in text.replace("\r\n", "\n").split("\n") if line]
