"""Turns settings that Python code gives, keywords or a dict by the flags' names, into the words of a command line.

    words_of({"num_layers": 2, "bf16": True, "data_path": ["0.5", "data/a", "0.5", "data/b"], "save": None}, {})
    # ["--num-layers=2", "--bf16", "--data-path", "0.5", "data/a", "0.5", "data/b"]

The parser of the command line then reads them: types, choices, bounds and the suggestion for a misspelled name are the
same, and so are the words of the errors.
"""

import difflib
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

from megatron_ext.config.parse import other_flags
from megatron_ext.config.parse.options import flag_of, options_by_flag
from megatron_ext.errors import ConfigurationError

Settings = Mapping[str, Any] | Sequence[str] | str | None
"""A dict of values by the flags' names; or words, or one text, as on a command line."""

_ANSWERED = {"--help", "-h", "--version"}
"""Flags whose answer ends a program."""

_PROGRAM_SWITCHES = {"--dry-run", "--allow-unknown-flags"}


def words_of(
    settings: Settings,
    keywords: Mapping[str, Any],
    is_known: Callable[[str], bool] | None = None,
    objects: Sequence[str] = (),
) -> list[str]:
    """Return the words of a command line that gives these settings.

    True stands for a switch, False for the switch turned off, None for a setting that is not given, a list for several
    values of one flag.

    Args:
        settings: values by the flags' names, with underscores or hyphens, or words as on a command line.
        keywords: further values, which win over `settings`.
        is_known: whether a program has this flag, for programs with flags of their own; default: the training's flags.
        objects: the names of the arguments that take functions and other objects, for a misspelled one.
    Raises:
        ConfigurationError: a value is nothing that a command line can say; or a flag would end the process (--help).
    """
    if isinstance(settings, Mapping):
        words, named = [], {_flag(name): value for name, value in {**settings, **keywords}.items()}
        named |= {_flag(name): value for name, value in keywords.items()}
    else:
        words = shlex.split(settings) if isinstance(settings, str) else [os.fspath(word) for word in settings or ()]
        named = {_flag(name): value for name, value in keywords.items()}
    known = is_known or _is_training_flag
    for flag, value in named.items():
        if not (known(flag) or _is_training_flag(flag) or _can_be_said(value)):
            raise ConfigurationError(_unknown_object(flag, value, objects))
        words += _words(flag, value, known)
    if answered := _ANSWERED.intersection(words):
        raise ConfigurationError(
            f"{min(answered)} prints a text and ends the process; use `megatron-ext pretrain --help` in a shell, or "
            "help(megatron_ext.pretrain)"
        )
    return words


def _flag(name: str) -> str:
    return flag_of(name.lstrip("-"))


def _is_training_flag(flag: str) -> bool:
    return (
        flag in options_by_flag()
        or flag in _PROGRAM_SWITCHES
        or other_flags.find_spelling(flag) is not None
        or other_flags.find_option(flag) is not None
    )


def _can_be_said(value: Any) -> bool:
    """Return whether a command line can say the value."""
    if isinstance(value, list | tuple):
        return all(map(_can_be_said, value))
    return value is None or isinstance(value, os.PathLike | str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Number) and not isinstance(value, complex)


def _unknown_object(flag: str, value: Any, objects: Sequence[str]) -> str:
    name = flag.removeprefix("--").replace("-", "_")
    close = difflib.get_close_matches(name, objects, n=1)
    kind = type(value).__name__
    if close:
        return f"unknown argument {name}=, which is given a {kind}; did you mean {close[0]}=?"
    taken = f"; objects are taken by {', '.join(f'{each}=' for each in objects)}" if objects else ""
    return f"unknown argument {name}=, which is given a {kind}{taken}"


def _words(flag: str, value: Any, is_known: Callable[[str], bool]) -> list[str]:
    """Return the words of one setting."""
    if value is None:
        return []
    if value is True:
        return [flag]
    if value is False:
        option = options_by_flag().get(flag)
        if option is not None and option.is_switch:
            return [f"{flag}=false"]
        return [] if is_known(flag) else [flag]  # an unknown one is named by the parser
    if not isinstance(value, list | tuple):
        return [f"{flag}={_text(flag, value)}"]
    texts = [_text(flag, item) for item in value]
    if len(texts) == 1:
        return [f"{flag}={texts[0]}"]
    for text in texts:
        if re.match(r"-(?!\.?\d)", text):
            raise ConfigurationError(
                f"{flag}: {text!r} begins with a hyphen, by which a command line knows a flag; give it by itself, or "
                "rename it"
            )
    return [flag, *texts]


def _text(flag: str, value: Any) -> str:
    """Return a value as a command line says it."""
    if isinstance(value, os.PathLike):
        return str(os.fspath(value))
    if isinstance(value, str | Number) and not isinstance(value, bool | complex):
        return str(value)
    raise ConfigurationError(
        f"{flag}: {value!r} is of type {type(value).__name__}; give a number, a text, a path, True or False, or a list "
        "of numbers, texts or paths"
    )
