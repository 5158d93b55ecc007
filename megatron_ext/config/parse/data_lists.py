"""Reads the files that list data in place of the command line: --data-args-path and --per-split-data-args-path.

The words of the first stand for --data-path; the second is a JSON object, whose `train`, `valid` and `test` stand for
--train-data-path, --valid-data-path and --test-data-path. They are read with the flags, so that a run's config.yaml
names the data itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.parse.blend import LIST_NAMES
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.parse.paths import path_problem
from megatron_ext.untrusted.text import TextError, load_json, read_file

_MOST_BYTES = 2**24
_PARTS = ("train", "valid", "test")
_WORDS = "a list of prefixes, or of weights and prefixes in turn"


def with_listed_data(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the typed values with the data that the listing files name in the place of these files, and the problems.

    A file that does not exist stays as it is: the rules name it with all others, and --dry-run believes in it.

    Raises:
        StorageError: this process may not read one of them.
    """
    listed = dict(values)
    problems = []
    for name in LIST_NAMES:
        path = values.get(name)
        if path is None:
            continue
        prefixes: dict[str, tuple[str, ...]] = {}
        try:
            if (problem := path_problem(flag_of(name), path, "read")) is not None:
                problems.append(problem)
            else:
                prefixes = dict(_read(name, path))
        except FileNotFoundError:
            continue
        except (OSError, TextError, UnicodeDecodeError) as error:
            problems.append(f"{flag_of(name)} {path} cannot be read: {getattr(error, 'strerror', None) or error}")
        del listed[name]
        problems += [
            f"{flag_of(name)} {path} and {flag_of(field)} name the same data; keep one of them"
            for field in prefixes
            if field in listed
        ]
        listed |= prefixes
    return listed, problems


def _read(name: str, path: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield field and words for each list in a file.

    Raises:
        TextError: it is not what the flag takes.
        OSError: it cannot be read.
        UnicodeDecodeError: it is no text.
    """
    content = read_file(path, _MOST_BYTES)
    if name == "data_args_path":
        yield "data_path", tuple(content.decode().split())
        return
    parts = load_json(content)
    if not isinstance(parts, dict) or not set(parts) <= set(_PARTS) or "train" not in parts:
        raise TextError(f"expected an object with {_PARTS[0]}, {_PARTS[1]} and {_PARTS[2]}, each {_WORDS}")
    for part, value in parts.items():
        items = value.split() if isinstance(value, str) else value
        if items is None or items == []:
            continue
        if not isinstance(items, list) or not all(isinstance(item, str | int | float) for item in items):
            raise TextError(f"{part} is not {_WORDS}")
        yield f"{part}_data_path", tuple(str(item) for item in items)
