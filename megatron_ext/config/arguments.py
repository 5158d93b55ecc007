"""The first stage of the configuration reads what the user typed: argv over the `--config` file.

`parse(["--num-layers", "4", "--config", "run.yaml"])` returns the typed values by field name; nothing is derived
and nothing is checked beyond types and choices. Every problem is collected before any is raised. A small parser
over the schema's metadata is used rather than argparse, which stops at the first problem and evaluates defaults.
"""

import difflib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.config import help_text, megatron_options
from megatron_ext.config.files import read_yaml
from megatron_ext.config.options import (
    Option,
    flag_of,
    options_by_flag,
    options_by_name,
    read_texts,
    read_yaml_value,
)
from megatron_ext.errors import ConfigurationError

_NUMBER = re.compile(r"-\.?\d")  # a word that begins so is a value, although it begins with a hyphen


@dataclass(frozen=True)
class Typed:
    """Holds what the user typed. `values` has only the fields that were given, by field name."""

    values: dict[str, Any]
    config_path: str | None = None
    dry_run: bool = False
    warnings: tuple[str, ...] = ()


@dataclass
class _Reading:
    """Holds the state of one parse: what was found so far, and what is wrong with it."""

    values: dict[str, Any] = field(default_factory=dict)
    config_path: str | None = None
    dry_run: bool = False
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def parse(argv: Sequence[str]) -> Typed:
    """Read the command line (without the program's name) and the YAML file that `--config` names.

    `--help` and `--version` print and exit with code 0.

    Raises:
        ConfigurationError: with every unknown flag, missing or ill-typed value and refused Megatron flag.
    """
    command_line = _Reading()
    for flag, inline, words in _flags(argv, command_line.problems):
        _read_flag(command_line, flag, inline, words)
    file = _Reading()
    if command_line.config_path is not None:
        _read_file(file, command_line.config_path)
    problems = command_line.problems + file.problems
    if problems:
        raise ConfigurationError(problems)
    return Typed(
        values=file.values | command_line.values,
        config_path=command_line.config_path,
        dry_run=command_line.dry_run,
        warnings=tuple(dict.fromkeys(file.warnings + command_line.warnings)),
    )


def _flags(argv: Sequence[str], problems: list[str]) -> list[tuple[str, str | None, list[str]]]:
    """Group argv into (flag, value after `=` or None, words up to the next flag)."""
    groups: list[tuple[str, str | None, list[str]]] = []
    for word in argv:
        if word.startswith("-") and not _NUMBER.match(word):
            flag, equals, value = word.partition("=")
            groups.append((flag, value if equals else None, []))
        elif groups:
            groups[-1][2].append(word)
        else:
            problems.append(f"unexpected argument {word!r}: every value follows a flag; see --help")
    return groups


def _read_flag(reading: _Reading, flag: str, inline: str | None, words: list[str]) -> None:
    texts = words if inline is None else [inline, *words]
    if flag in ("--help", "-h", "--version"):
        about = help_text.about(texts[0]) if texts else help_text.text()
        print(help_text.version() if flag == "--version" else about)
        sys.exit(0)
    elif flag == "--dry-run":
        reading.dry_run = True
        _refuse_extra(reading, flag, texts)
    elif flag == "--config":
        if texts:
            reading.config_path = texts[0]
            _refuse_extra(reading, flag, texts[1:])
        else:
            reading.problems.append("--config needs the path of a YAML file")
    elif flag in options_by_flag():
        _read_option(reading, flag, options_by_flag()[flag], inline, words)
    elif (known := megatron_options.find(flag)) is not None:
        own = texts[: known.most_values]
        _refuse_extra(reading, flag, texts[known.most_values :])
        _judge_megatron(reading, known, own)
    else:
        reading.problems.append(_unknown(flag))


def _read_option(reading: _Reading, flag: str, option: Option, inline: str | None, words: list[str]) -> None:
    if option.is_switch:
        # `--switch=false` undoes a `true` of the configuration file; a bare switch never takes the next word.
        texts, extra = ([inline] if inline is not None else ["true"]), words
    else:
        texts = words if inline is None else [inline, *words]
        texts, extra = (texts, []) if option.many else (texts[:1], texts[1:])
    _refuse_extra(reading, flag, extra)
    if not texts:
        reading.problems.append(f"{flag} needs a value: {flag} {option.metavar}")
        return
    try:
        reading.values[option.name] = read_texts(option, texts)
    except ValueError as error:
        reading.problems.append(f"{flag}: {error}")


def _judge_megatron(reading: _Reading, known: megatron_options.MegatronOption, values: list[str]) -> None:
    if not values and known.most_values == 1:
        reading.problems.append(f"{known.flag} needs a value; but {known.reason}")
    elif known.is_neutral(values):
        return
    elif known.accepted:
        reading.warnings.append(f"{known.flag} changes nothing here: {known.reason}")
    else:
        reading.problems.append(f"{' '.join([known.flag, *values])} is not supported: {known.reason}")


def _refuse_extra(reading: _Reading, flag: str, extra: list[str]) -> None:
    reading.problems += [f"unexpected argument {word!r} after {flag}" for word in extra]


def _unknown(flag: str) -> str:
    candidates = [*options_by_flag(), "--config", "--dry-run", "--help", "--version"]
    close = difflib.get_close_matches(flag, candidates, n=1, cutoff=0.6)
    if not close:
        return f"unknown flag {flag}; see --help for all flags"
    return f"unknown flag {flag}; did you mean {close[0]}?"


def _read_file(reading: _Reading, path: str) -> None:
    try:
        content = read_yaml(path)
    except ConfigurationError as error:
        reading.problems += error.problems
        return
    for key, value in content.items():
        name = key.replace("-", "_")
        option = options_by_name().get(name)
        if value is None:
            continue  # an empty value is one that was not given
        try:
            if option is not None:
                reading.values[name] = read_yaml_value(option, value)
            elif (known := megatron_options.find(flag_of(name))) is not None:
                if value is not False:
                    items = [] if value is True else value if isinstance(value, list) else [value]
                    _judge_megatron(reading, known, [str(item) for item in items])
            else:
                close = difflib.get_close_matches(name, options_by_name(), n=1, cutoff=0.6)
                hint = f"; did you mean {close[0]}?" if close else "; see --help for all names"
                reading.problems.append(f"{path}: unknown name {key}{hint}")
        except ValueError as error:
            reading.problems.append(f"{path}: {key}: {error}")
