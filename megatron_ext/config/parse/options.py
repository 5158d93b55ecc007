"""The schema is seen here as options: one `Option` per field, with its flag, its type, and how to read a value.

Everything that speaks of flags (the command line, `--config` files, `--help`, docs/flags.md) goes through here,
so that a field is declared once, in the schema.
"""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.schema import Config
from megatron_ext.config.schema.option import MOST, Need, ReadWith, Resume
from megatron_ext.registry import brought

_TYPE_WORDS = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class Option:
    """One field of the schema, with the arguments of `schema.option.option`.

    `type` is the type of a single value; `many` tells whether the field takes several.
    """

    name: str
    group: str
    type: type
    many: bool
    default: Any
    help: str
    resume: Resume
    required: str | None
    at_least: int | None
    at_most: int | None
    positive: bool
    share: bool
    saves_memory: bool
    choices: tuple[Any, ...] | None
    refused: tuple[tuple[Any, str], ...]
    """Pairs of a value of Megatron's that is none of the choices, and why."""

    needs: tuple[tuple[Any, Need], ...]
    """Pairs of a value and the condition that it needs."""

    metavar: str
    aliases: tuple[str, ...]
    joined: bool
    repeats: bool
    read_with: tuple[ReadWith, ...]
    dropped_unread: bool
    turns_on_a_plugin: bool
    packages: tuple[tuple[Any, str], ...]
    """Pairs of a value, None for every one but the default, and the package that it needs."""

    needs_gpu: tuple[Any, ...]
    """Values that only a GPU can do."""

    untried_with_graphs: bool
    computed_by_ours: bool
    unread_on_cpu: str

    @property
    def flag(self) -> str:
        """The flag, `--num-layers`."""
        return flag_of(self.name)

    def typed(self, value: Any) -> str:
        """Return how a command line says a value, `--num-layers 4`."""
        return self.flag if self.is_switch else f"{self.flag} {value}"

    @property
    def is_switch(self) -> bool:
        """Whether the flag takes no value."""
        return self.type is bool


def flag_of(name: str) -> str:
    """Return `--num-layers` for `num_layers`."""
    return "--" + name.replace("_", "-")


@functools.cache
def options() -> tuple[Option, ...]:
    """Return every option, in the order of the schema."""
    declared = []
    for group in dataclasses.fields(Config):
        group_type = typing.cast(type, group.type)
        hints = typing.get_type_hints(group_type)
        for field in dataclasses.fields(group_type):
            value_type, many = _single_type(hints[field.name])
            told = dict(field.metadata)
            more = [choice for choice in brought("choices") if choice.field == field.name]
            if more and told["choices"] is not None:
                told["choices"] = (*told["choices"], *(choice.value for choice in more))
                told["needs"] += tuple((choice.value, need) for choice in more for need in choice.needs)
            words = ", ".join(f"{choice.value} {choice.words}" for choice in more)
            told["help"] = told["help"].replace("{choices}", words)
            told["metavar"] = told["metavar"] or _metavar(value_type, many, told["choices"])
            declared.append(
                Option(name=field.name, group=group.name, type=value_type, many=many, default=field.default, **told)
            )
    return tuple(declared)


@functools.cache
def options_by_flag() -> dict[str, Option]:
    """Return flag or alias -> option."""
    return {flag: option for option in options() for flag in (option.flag, *option.aliases)}


@functools.cache
def options_by_name() -> dict[str, Option]:
    """Return field name -> option."""
    return {option.name: option for option in options()}


def counted(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by field name, with the values of further fields that plugins' switches imply."""
    return {
        **values,
        **{name: value for stands_for in brought("counts_as") for name, value in stands_for(values).items()},
    }


@functools.cache
def names_by_resume(resume: Resume) -> tuple[str, ...]:
    """Return the fields that have this resume role, in the order of the schema."""
    return tuple(option.name for option in options() if option.resume == resume)


def read_texts(option: Option, texts: list[str]) -> Any:
    """Return the value of an option from the words that follow its flag.

    Raises:
        ValueError: a word is not of the option's type, or not one of its choices.
    """
    values = tuple(_read_text(option, text) for text in texts)
    return values if option.many else values[0]


def read_yaml_value(option: Option, value: Any) -> Any:
    """Return the value of an option from a parsed YAML value.

    Numbers may come as text: YAML 1.1 reads `1e-3`, which has no dot, as text.

    Raises:
        ValueError: the value is not of the option's type, or not one of its choices.
    """
    if option.many:
        items = value if isinstance(value, list) else [value]
        if not items:
            raise ValueError("the list is empty")
        return tuple(_read_yaml_scalar(option, item) for item in items)
    return _read_yaml_scalar(option, value)


def _read_yaml_scalar(option: Option, value: Any) -> Any:
    if isinstance(value, bool) != option.is_switch or isinstance(value, list | dict) or value is None:
        raise ValueError(f"{value!r} is not {_TYPE_WORDS[option.type]}")
    if option.is_switch:
        return value
    if isinstance(value, int | float | str):
        return _read_text(option, str(value))
    raise ValueError(f"{value!r} is not {_TYPE_WORDS[option.type]}")


def _read_text(option: Option, text: str) -> Any:
    value: Any = text
    if option.is_switch:
        if text not in ("true", "false"):
            raise ValueError(f"{text!r} is not true or false")
        return text == "true"
    if option.type is not str:
        try:
            value = option.type(text)
        except ValueError:
            raise ValueError(f"{_short(text)} is not {_TYPE_WORDS[option.type]}") from None
        if option.type is float and not math.isfinite(value):
            raise ValueError(f"{text!r} is not a finite number")
        if option.type is int:
            check_size(option, value)
    else:
        check_text(text)
    if option.choices == ():
        raise ValueError(f"{text!r} needs a plugin that is not installed; install it, or leave the flag out")
    if option.choices is not None and value not in option.choices:
        reason = dict(option.refused).get(value)
        why = "is not" if reason is None else f"is not supported: {reason}; use"
        meant = _meant(text, option.choices) if reason is None else ""
        raise ValueError(f"{text!r} {why} one of {', '.join(map(str, option.choices))}{meant}")
    return value


def _meant(text: str, choices: tuple[Any, ...]) -> str:
    import difflib  # as for what an unknown flag meant: nobody else waits for it

    known = {str(choice).lower(): choice for choice in choices}
    close = difflib.get_close_matches(text.lower(), known, n=1, cutoff=0.6)
    return f"; did you mean {known[close[0]]}?" if close else ""


def check_size(option: Option, value: int) -> None:
    """Raise ValueError where an integer is larger than any that is meant well: before anything counts up to it."""
    most = MOST if option.at_most is None else option.at_most
    if abs(value) > most:
        shown = value if abs(value) < MOST**2 else "this number"
        raise ValueError(f"{shown} is above {most}; use {most} or less")


def check_text(text: str) -> None:
    """Raise ValueError where a text is none that a file's name or a checkpoint's configuration can hold."""
    if not text:
        raise ValueError("the value is empty; give one, or leave the flag out")
    if "\0" in text:
        raise ValueError(f"{_short(text)} holds a zero byte")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError(f"{_short(text)} is not UTF-8; rename the file, or correct the value")


def _short(text: str) -> str:
    """Return a text for a message, without the middle of a long one."""
    return repr(text) if len(text) <= 200 else f"{text[:100]!r}...{text[-20:]!r} ({len(text)} characters)"


def _single_type(hint: Any) -> tuple[type, bool]:
    """Return (int, False) for `int | None`, and (str, True) for `tuple[str, ...] | None`."""
    if isinstance(hint, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        return typing.get_args(hint)[0], True
    return hint, False


def _metavar(value_type: type, many: bool, choices: Any) -> str:
    if value_type is bool:
        return ""
    if choices:
        return "{" + ",".join(map(str, choices)) + "}"
    word = {int: "N", float: "X", str: "TEXT"}[value_type]
    return f"{word} ..." if many else word
