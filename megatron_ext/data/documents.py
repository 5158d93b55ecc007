"""Documents out of text files, in the order of the files: the input side of the tools.

.jsonl holds one JSON object a line, .txt one document a file, or several with a separator. The parent process only
cuts files into records; parsing and encoding happen where the record ends up (`Record.texts`).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.errors import ConfigurationError, DataError

_JSON_SUFFIXES = (".jsonl", ".json")
_SUFFIXES = (*_JSON_SUFFIXES, ".txt")


@dataclass(frozen=True)
class Record:
    """Undecoded bytes of one JSON line, or of one text document."""

    file: str
    position: int  # line of a JSON file, document of a text file; from 1
    payload: bytes
    is_json: bool

    @property
    def where(self) -> str:
        return f"{self.file}:{self.position}"

    def texts(self, keys: Sequence[str]) -> list[str]:
        """The document's text under each key; a .txt file has one text whatever the key.

        Raises:
            DataError: not UTF-8, not a JSON object, or a key that is missing or holds no text.
        """
        try:
            text = self.payload.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where}: not UTF-8 at byte {error.start}: {error.reason}") from error
        if not self.is_json:
            return [text for _ in keys]
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{self.where}: not a line of JSON: {error}") from error
        if not isinstance(fields, dict):
            raise DataError(f"{self.where}: a JSON object is wanted on each line, this is {type(fields).__name__}")
        for key in keys:
            if not isinstance(fields.get(key), str):
                found = f"holds {type(fields[key]).__name__}, not text" if key in fields else "is missing"
                raise DataError(f'{self.where}: key "{key}" {found}; the keys are {sorted(fields)} (--json-keys)')
        return [fields[key] for key in keys]


def find_files(inputs: Sequence[str]) -> list[Path]:
    """The input files, folders replaced by the .jsonl, .json and .txt files below them, sorted by path.

    Raises:
        ConfigurationError: an input does not exist, is of another kind, or a folder holds no such file.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if not path.exists():
            raise ConfigurationError(f"--input {name} does not exist")
        if path.is_dir():
            found = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
            if not found:
                raise ConfigurationError(f"--input {name} is a folder with no {', '.join(_SUFFIXES)} file in it")
            files += found
        elif path.suffix in _SUFFIXES:
            files.append(path)
        else:
            raise ConfigurationError(f"--input {name}: the name of an input must end in one of {', '.join(_SUFFIXES)}")
    return files


def read_records(files: Sequence[Path], split_on: str | None = None) -> Iterator[Record]:
    """Cut files into records, in order. Blank lines of JSON files hold no document.

    Args:
        files: as from `find_files`.
        split_on: what stands between two documents of a .txt file; without it the file is one document.
    """
    for file in files:
        if file.suffix in _JSON_SUFFIXES:
            with open(file, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield Record(str(file), number, line, is_json=True)
        else:
            content = file.read_bytes()
            pieces = content.split(split_on.encode()) if split_on else [content]
            for number, piece in enumerate(pieces, start=1):
                if piece or not split_on:
                    yield Record(str(file), number, piece, is_json=False)
