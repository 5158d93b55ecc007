"""The first stage of the configuration reads what the user typed: argv over the `--config` file.

`parse(["--num-layers", "4", "--config", "run.yaml"])` returns the typed values by field name; nothing is derived
and nothing is checked beyond types and choices. `read` returns the problems with the values, so that the rules can
speak of the rest in the same round; `parse` raises them. A small parser over the schema's metadata is used rather than
argparse, which stops at the first problem and evaluates defaults.

Modules that only some command lines need (files, the search for misspelled flags) are imported where they are used, so
that `--help` does not wait for them.
"""

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.config.parse import help_text, other_flags
from megatron_ext.config.parse.ineffective_flags import without_effect
from megatron_ext.config.parse.options import (
    Option,
    flag_of,
    options_by_flag,
    options_by_name,
    read_texts,
    read_yaml_value,
)
from megatron_ext.errors import ConfigurationError
from megatron_ext.terminal import say

_NUMBER = re.compile(r"-\.?\d")  # a word that begins so is a value, although it begins with a hyphen
_PROGRAM_VALUES = {
    "--config": "the path of a YAML file",
    "--recipe": "the name of a recipe, for example llama3.1-8b",
    "--device-memory-gb": "the memory of a device in GB, for example 80",
    "--device-name": "the name of a device, for example h100",
}
"""Flags of the program that take a value, and a description of the value."""

_CLOSE = 0.8  # similarity (difflib's ratio) above which an unknown name is taken for a slip of the pen


@dataclass(frozen=True)
class Typed:
    """Holds what the user typed. `values` has only the fields that were given, by field name."""

    values: dict[str, Any]
    config_path: str | None = None
    dry_run: bool = False
    device_memory_gb: float | None = None
    """Memory of a device that --dry-run judges the layout against, in GB (1e9 bytes)."""

    device_name: str | None = None
    """Device that --dry-run judges the layout against, a row of `plan.hardware.TABLE`."""

    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    """Problems of the flags themselves; empty in the result of `parse`, which raises them."""

    unread: frozenset[str] = frozenset()
    """Fields that were given, but whose value could not be read, or whose flag is misspelled; for a file that could not
    be read, all fields that the command line does not give."""

    spellings: Mapping[str, str] = field(default_factory=dict)
    """Flag as messages write it -> flag as the user typed it, for fields that were given only by another name."""

    words: tuple[str, ...] = field(default=(), compare=False)
    """The command line, for the record of the run's command."""

    def as_typed(self, texts: Iterable[str]) -> list[str]:
        """Return messages with every flag named as it was typed."""
        return [_renamed(text, self.spellings) for text in texts]


@dataclass
class _Reading:
    """The state of one parse: values and problems so far."""

    values: dict[str, Any] = field(default_factory=dict)
    config_path: str | None = None
    recipe: str | None = None
    dry_run: bool = False
    allow_unknown: bool = False
    device_memory_gb: float | None = None
    device_name: str | None = None
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unread: set[str] = field(default_factory=set)
    unknown: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of an unknown name and the problem about it."""
    spelled: dict[str, dict[str, tuple[str, Any]]] = field(default_factory=dict)
    """Field -> name by which it was given -> how a message shows that, and the value."""
    implied: dict[str, Any] = field(default_factory=dict)
    """Values of further fields that an old spelling implies, unless a flag sets them."""

    def give(self, name: str, spelling: str, shown: str, value: Any) -> None:
        """Note the value of a field, given by one of its names; the last one by the same name counts."""
        self.values[name] = value
        self.spelled.setdefault(name, {})[spelling] = shown, value

    def contradictions(self, where: str = "") -> list[str]:
        """Return a problem for each field that two names give different values, and note that it has none."""
        problems = []
        for name, spellings in self.spelled.items():
            (first, value), *others = spellings.values()
            different = [shown for shown, other in others if other != value]
            problems += [f"{where}{first} and {shown} are the same option; keep one of them" for shown in different]
            self.unread |= {name} if different else set()
        return problems

    def spellings(self) -> dict[str, str]:
        """Return `Typed.spellings` of the fields that were given here."""
        old_names = {}
        for name, by_spelling in self.spelled.items():
            flag, names = flag_of(name), [one if one.startswith("--") else flag_of(one) for one in by_spelling]
            if flag in names:
                continue
            old = names[0]
            meaning = other_flags.find_spelling(old)
            old_names[flag if meaning is None or meaning[1] is None else f"{flag} {meaning[1]}"] = old
        return old_names


def _renamed(text: str, spellings: Mapping[str, str]) -> str:
    for new, old in spellings.items():
        text = re.sub(rf"{re.escape(new)}(?![\w-])", old, text)
    return text


def parse(argv: Sequence[str]) -> Typed:
    """Read the command line (without the program's name) and the YAML file that `--config` names.

    `--help` and `--version` print and exit with code 0.

    Raises:
        ConfigurationError: with every unknown flag, missing or ill-typed value and refused Megatron flag.
        StorageError: as `read`.
    """
    typed = read(argv)
    if typed.problems:
        raise ConfigurationError(list(typed.problems))
    return typed


def read(argv: Sequence[str]) -> Typed:
    """Return the typed values as `parse` does, but with the problems in the result instead of raised.

    Raises:
        StorageError: this process may not read a file that gives further values.
    """
    command_line = _Reading()
    for flag, inline, words in flag_groups(argv, command_line.problems):
        _read_flag(command_line, flag, inline, words)
    from megatron_ext.config.parse import data_lists

    file, recipe = _Reading(), _Reading()
    if command_line.config_path is not None:
        _read_file(file, command_line.config_path)
    if command_line.recipe is not None:
        _read_recipe(recipe, command_line.recipe, command_line, file)
    command_line.problems += command_line.contradictions()
    order = (recipe, file, command_line)  # the later win
    merged = {name: value for one in order for name, value in one.implied.items()}
    merged |= {name: value for one in order for name, value in one.values.items()}
    spellings = _Reading(spelled=recipe.spelled | file.spelled | command_line.spelled).spellings()
    listed, wrong_lists = data_lists.with_listed_data(merged)
    values, dropped = without_effect(_with_default_tokenizer(listed))
    if not command_line.dry_run:
        _refuse_devices(command_line)
    _judge_unknown(command_line, [*command_line.unknown, *file.unknown, *recipe.unknown])
    return Typed(
        values=values,
        config_path=command_line.config_path,
        dry_run=command_line.dry_run,
        device_memory_gb=command_line.device_memory_gb,
        device_name=command_line.device_name,
        warnings=tuple(
            dict.fromkeys(
                recipe.warnings
                + file.warnings
                + command_line.warnings
                + [_renamed(warning, spellings) for warning in dropped]
            )
        ),
        problems=tuple(command_line.problems + file.problems + recipe.problems + wrong_lists),
        unread=frozenset(command_line.unread | (file.unread | recipe.unread) - command_line.values.keys()),
        spellings=spellings,
    )


def _with_default_tokenizer(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with the tokenizer that reads --vocab-file and --merge-file, where none is named: Megatron's
    default."""
    if "tokenizer_type" in values or not {"vocab_file", "merge_file"} <= values.keys():
        return values
    return {**values, "tokenizer_type": "GPT2BPETokenizer"}


def _refuse_devices(reading: _Reading) -> None:
    for flag, value in (("--device-memory-gb", reading.device_memory_gb), ("--device-name", reading.device_name)):
        if value is not None:
            reading.problems.append(f"{flag} is what --dry-run judges a layout by; add --dry-run, or leave it out")


def _judge_unknown(reading: _Reading, unknown: list[tuple[str, str]]) -> None:
    if reading.allow_unknown:
        reading.warnings += [f"{name} is unknown and left out, as --allow-unknown-flags says" for name, _ in unknown]
    else:
        reading.problems += [problem for _, problem in unknown]


def flag_groups(argv: Sequence[str], problems: list[str]) -> list[tuple[str, str | None, list[str]]]:
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
        say(help_text.version() if flag == "--version" else help_text.about(texts))
        sys.exit(0)
    elif flag == "--dry-run":
        reading.dry_run = True
        _refuse_extra(reading, flag, texts)
    elif flag == "--allow-unknown-flags":
        reading.allow_unknown = True
        _refuse_extra(reading, flag, texts)
    elif flag in _PROGRAM_VALUES:
        _refuse_extra(reading, flag, texts[1:])
        if texts:
            _read_program_value(reading, flag, texts[0])
        else:
            reading.problems.append(f"{flag} needs {_PROGRAM_VALUES[flag]}")
    else:
        _read_known(reading, flag, inline, words)


def _read_program_value(reading: _Reading, flag: str, text: str) -> None:
    if flag == "--config":
        reading.config_path = text
    elif flag == "--recipe":
        reading.recipe = text
    elif flag == "--device-name":
        reading.device_name = text
    else:
        try:
            reading.device_memory_gb = float(text)
        except ValueError:
            reading.problems.append(f"{flag}: {text!r} is not a number")
            return
        if not 0 < reading.device_memory_gb < float("inf"):
            reading.problems.append(f"{flag} {text} is not above 0; use {flag} 80")


def _read_known(reading: _Reading, word: str, inline: str | None, words: list[str]) -> None:
    """Read a flag of the schema, or one of Megatron's others; underscores in it stand for hyphens."""
    flag = word if word in options_by_flag() else word.replace("_", "-")
    texts = words if inline is None else [inline, *words]
    if flag in options_by_flag():
        _read_option(reading, flag, options_by_flag()[flag], inline, words)
    elif (old := other_flags.find_spelling(flag)) is not None:
        _read_old(reading, flag, old, inline, words)
    elif (known := other_flags.find_option(flag)) is not None:
        own = texts[: known.most_values]
        _refuse_extra(reading, flag, texts[known.most_values :])
        _judge_megatron(reading, known, own)
    else:
        instead = other_flags.advice(word)
        problem = _unknown(word, reading.unread) if instead is None else f"{word} is unknown: {instead}"
        reading.unknown.append((word, problem))


def _read_old(reading: _Reading, flag: str, old: tuple[str, str | None], inline: str | None, words: list[str]) -> None:
    name, value = old
    reading.implied |= other_flags.implied_values(flag)
    if value is None:
        _read_option(reading, flag, options_by_name()[name], inline, words)
    else:
        reading.give(name, flag, flag, value)
        _refuse_extra(reading, flag, words if inline is None else [inline, *words])


def _read_option(reading: _Reading, flag: str, option: Option, inline: str | None, words: list[str]) -> None:
    if option.is_switch:
        # `--switch=false` undoes a `true` of the configuration file; a bare switch never takes the next word.
        texts, extra = ([inline] if inline is not None else ["true"]), words
    else:
        texts = words if inline is None else [inline, *words]
        texts = [" ".join(texts)] if option.joined and texts else texts
        texts, extra = (texts, []) if option.many else (texts[:1], texts[1:])
    _refuse_extra(reading, flag, extra)
    if not texts:
        reading.unread.add(option.name)
        reading.problems.append(f"{flag} needs a value: {flag} {option.metavar}")
        return
    try:
        value = read_texts(option, [_taken(reading, flag, option, text) for text in texts])
        if option.repeats:
            value = (*reading.values.get(option.name, ()), *value)
        shown = f"{flag} {' '.join(texts)}" if not option.is_switch else flag if value else f"{flag}=false"
        reading.give(option.name, flag, shown, value)
    except ValueError as error:
        reading.unread.add(option.name)
        reading.problems.append(f"{flag}: {error}")


def _taken(reading: _Reading, flag: str, option: Option, text: str) -> str:
    """Return the value that is taken for this text, with a warning where that value works differently to the same
    end."""
    current, instead = other_flags.taken_value(option.name, text)
    if instead is not None:
        reading.warnings.append(f"{flag} {text} changes nothing here: {instead}")
    return current


def _judge_megatron(reading: _Reading, known: other_flags.OtherOption, values: list[str]) -> None:
    if not values and known.needs_value:
        reading.problems.append(f"{known.flag} needs a value{'' if known.accepted else f'; but {known.reason}'}")
    elif (why_not := known.refused_values.get(" ".join(values))) is not None:
        reading.problems.append(f"{' '.join([known.flag, *values])} is not supported: {why_not}")
    elif known.is_neutral(values):
        return
    elif known.accepted:
        reading.warnings.append(known.warning)
    else:
        reading.problems.append(f"{' '.join([known.flag, *values])} is not supported: {known.reason}")


def _refuse_extra(reading: _Reading, flag: str, extra: list[str]) -> None:
    reading.problems += [f"unexpected argument {word!r} after {flag}" for word in extra]


def _unknown(flag: str, unread: set[str]) -> str:
    candidates = [*options_by_flag(), *_PROGRAM_VALUES, "--dry-run", "--help", "--version", "--allow-unknown-flags"]
    close = _closest(flag.removeprefix("--").replace("_", "-"), [known.removeprefix("--") for known in candidates])
    if close is None:
        return f"unknown flag {flag}; see --help all for every flag, or add --allow-unknown-flags to leave it out"
    if (meant := options_by_flag().get(f"--{close}")) is not None:
        unread.add(meant.name)
    return f"unknown flag {flag}; did you mean --{close}?"


def _closest(name: str, candidates: Sequence[str]) -> str | None:
    """Return the candidate that the name was meant for, its words perhaps in another order; None where it is near to
    none of them."""
    best = max(candidates, key=lambda candidate: _similarity(name, candidate))
    return best if _similarity(name, best) >= _CLOSE else None


def _similarity(name: str, other: str) -> float:
    import difflib

    def ratio(one: str, two: str) -> float:
        return difflib.SequenceMatcher(None, one, two).ratio()

    swapped = 0.9 if sorted(name) == sorted(other) else 0.0  # two letters of a short name are a large part of it
    return max(
        swapped, ratio(name, other), ratio(*("-".join(sorted(re.split("[-_]", text))) for text in (name, other)))
    )


def _read_file(reading: _Reading, path: str) -> None:
    from megatron_ext.config.parse.config_file import read_yaml
    from megatron_ext.config.parse.paths import path_problem

    try:
        if (problem := path_problem("--config", path, "read")) is not None:
            raise ConfigurationError(problem)
        content = read_yaml(path)
    except ConfigurationError as error:
        reading.problems += error.problems
        reading.unread |= options_by_name().keys()
        return
    for key, value in content.items():
        if value is not None:  # an empty value is one that was not given
            _read_entry(reading, path, key, value)
    reading.problems += reading.contradictions(f"{path}: ")


def _read_recipe(reading: _Reading, name: str, command_line: _Reading, file: _Reading) -> None:
    """Read a recipe, which names no data. For --dry-run without data, synthetic tokens stand for it, and the devices
    that the recipe is made for are those that it is judged on, unless the command line says others."""
    import os

    from megatron_ext.config.parse.recipe_files import find_recipe, heading

    try:
        path = find_recipe(name)
    except ConfigurationError as error:
        reading.problems += error.problems
        reading.unread |= options_by_name().keys() - command_line.values.keys() - file.values.keys()
        return
    _read_file(reading, str(path))
    given = file.values.keys() | command_line.values.keys()
    if not command_line.dry_run:
        return
    assumed = []
    if not given & {"data_path", "train_data_path", "data_args_path", "per_split_data_args_path", "mock_data"}:
        reading.values |= {"mock_data": True, "tokenizer_type": "NullTokenizer"}
        assumed.append("synthetic tokens")
    devices = next(iter(heading(path).devices), None)
    if devices is not None and "world_size" not in given and "WORLD_SIZE" not in os.environ:
        reading.values["world_size"] = devices.number
        assumed.append(f"{devices}, which it is made for (--world-size {devices.number})")
        if command_line.device_name is None and command_line.device_memory_gb is None:
            command_line.device_name, command_line.device_memory_gb = devices.name, devices.memory_gb
    if assumed:
        reading.warnings.append(f"--recipe {name} is judged with {' on '.join(assumed)}")


def _read_entry(reading: _Reading, path: str, key: str, value: Any) -> None:
    """Read one line of a configuration file."""
    name = key.replace("-", "_")
    if (old := other_flags.find_spelling(flag_of(name))) is not None:
        implied = other_flags.implied_values(flag_of(name))
        name, fixed = old
        value = value if fixed is None else fixed if value is True else None
        reading.implied |= implied if value is not None else {}
    option = options_by_name().get(name)
    try:
        if value is None:
            return  # a switch that is off
        if option is not None:
            value = read_yaml_value(option, _taken_yaml(reading, option, value))
            reading.give(name, key, key, value)
        elif (known := other_flags.find_option(flag_of(name))) is not None:
            if value is not False:
                items = [] if value is True else value if isinstance(value, list) else [value]
                _judge_megatron(reading, known, [str(item) for item in items])
        else:
            close = _closest(name, list(options_by_name()))
            hint = f"; did you mean {close}?" if close else "; see --help all for every name"
            reading.unread |= {close} if close else set()
            reading.unknown.append((f"{path}: {key}", f"{path}: unknown name {key}{hint}"))
    except ValueError as error:
        reading.unread.add(name)
        reading.problems.append(f"{path}: {key}: {error}")


def _taken_yaml(reading: _Reading, option: Option, value: Any) -> Any:
    if isinstance(value, list):
        return [_taken_yaml(reading, option, item) for item in value]
    return _taken(reading, option.flag, option, value) if isinstance(value, str) else value
