"""Translates another program's configuration file, key by key, into flags of ours.

    result = translate("axolotl", read("config.yaml"))
    result.command        # {"--lr": "2e-05", "--bf16": "", ...}
    result.keys           # what became of every key; none is dropped

A flag that this version refuses is not printed: the parser's own reason takes its place.
"""

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from megatron_ext.config.derived.optimizers import OPTIMIZERS, OptimizerTraits
from megatron_ext.config.derived.sharding import FLAGS
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import flag_of, options_by_name
from megatron_ext.errors import ConfigurationError
from megatron_ext.foreign import accelerate, axolotl, deepspeed
from megatron_ext.foreign.key_meanings import Cases, Default, Fact, Flags, Launch, Meaning, NoCounterpart, OfOptimizer
from megatron_ext.foreign.parallel_sizes import Layout, solve
from megatron_ext.untrusted.text import load_json, read_file
from megatron_ext.untrusted.yaml_text import MOST_YAML, load_yaml

SOURCES: dict[str, ModuleType] = {"deepspeed": deepspeed, "accelerate": accelerate, "axolotl": axolotl}


@dataclass(frozen=True)
class Key:
    """Records what became of one key: its flags, or why there are none."""

    name: str
    value: Any
    became: str
    """One of KINDS."""
    flags: str = ""
    reason: str = ""


KINDS = {
    "flags": "flags",
    "layout": "sizes of the layout",
    "launch": "given to torchrun",
    "data": "given to megatron-ext preprocess",
    "default": "needs no flag",
    "none": "no counterpart",
    "unknown": "unknown",
}


_WITH_THE_WEIGHTS = "the optimizer's state is in host memory where the weights are"
_CONTAINED = {
    ("--overlap-grad-reduce", "--use-torch-fsdp2"): "FSDP2 reduces while the backward pass still runs",
    ("--optimizer-cpu-offload", "--torch-fsdp2-cpu-offload"): _WITH_THE_WEIGHTS,
    ("--optimizer-offload-fraction", "--torch-fsdp2-cpu-offload"): _WITH_THE_WEIGHTS,
}
"""What a flag does already next to another, and why."""

_SHARDING = {flag_of(flag) for flag in FLAGS}


@dataclass(frozen=True)
class Translation:
    """The result of translating one file."""

    keys: tuple[Key, ...]
    layout: Layout
    command: dict[str, str]
    """Flag -> its values as one text, empty for a switch."""
    preparing: tuple[str, ...] = ()
    """Command lines that make the data, to be run before."""

    def words(self) -> list[str]:
        """Return the flags as a command line."""
        return [word for flag, value in self.command.items() for word in (flag, *shlex.split(value))]


def read(path: str) -> dict[str, Any]:
    """Return the content of a JSON or YAML file.

    Raises:
        ConfigurationError: the file cannot be read, is neither JSON nor YAML, names a key twice, or is no mapping.
    """
    try:
        raw = read_file(path, MOST_YAML, pipes=True)
        content = load_json(raw) if path.endswith(".json") else load_yaml(raw.decode())
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}; give the path of a configuration file") from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: {' '.join(str(error).split())}; correct it there") from None
    if not isinstance(content, dict) or not content:
        raise ConfigurationError(f"{path}: expected names and values, as in `train_batch_size: 32`")
    return content


def translate(
    source: str,
    content: Mapping[str, Any],
    world_size: int | None = None,
    samples_of_epoch: Callable[[int, str], int] | None = None,
) -> Translation:
    """Translate `content`, a file of the program `source` (a key of SOURCES).

    Args:
        source: a key of SOURCES.
        content: the file.
        world_size: number of ranks, where the file does not say it.
        samples_of_epoch: returns the samples of a pass over the training data, for --seq-length and --split; without
            it passes over the data have no counterpart.

    Raises:
        ConfigurationError: the file's sizes contradict each other.
    """
    module = SOURCES[source]
    facts: dict[str, int] = {}
    optimizer = _optimizer(content, module)
    keys = [_translate_key(name, value, module, facts, optimizer) for name, value in leaves(content)]
    present = {key.name for key in keys if key.became == "flags"}
    keys = [_shadow(key, module.SHADOWED, present) for key in keys]
    layout = solve(facts, world_size, module.DEFAULT_ACCUMULATION)
    data = axolotl.prepare(content) if module is axolotl else axolotl.PreparedData()
    keys = [_of_data(key, data) for key in keys]
    command: dict[str, str] = {}
    for index, key in enumerate(keys):
        keys[index] = accepted = _refused(key)
        flags = split_flags(accepted.flags)
        # An optimizer brings defaults with it, in whose place other keys may have put something else already.
        brought = command.keys() & flags.keys() if "--optimizer" in flags else ()
        command |= {flag: value for flag, value in flags.items() if flag not in brought}
    command |= split_flags(data.flags)
    keys = [_of_epochs(key, command, layout, samples_of_epoch) for key in keys]
    sizes = {flag: value for flag, value in layout.flags().items() if _refusal(f"{flag} {value}") is None}
    missing = [f"{flag} {value}" for flag, value in layout.flags().items() if flag not in sizes]
    keys += [Key(flags, "", "none", reason=_refusal(flags) or "") for flags in missing]
    for (flag, other), reason in _CONTAINED.items():
        if other in command and command.pop(flag, None) is not None:
            keys = [_contained(key, flag, reason) for key in keys]
    if "shard" in facts and not _SHARDING & command.keys():
        keys = [_unsharded(key) for key in keys]
    return Translation(tuple(keys), layout, sizes | command, data.commands)


def leaves(content: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of everything that is not a mapping; a list is a value unless it holds mappings."""
    if isinstance(content, Mapping) and content:
        for name, value in content.items():
            yield from leaves(value, f"{path}.{name}" if path else str(name))
    elif isinstance(content, list) and any(isinstance(item, Mapping) for item in content):
        for index, item in enumerate(content):
            yield from leaves(item, f"{path}.{index}")
    else:
        yield path, content


def split_flags(text: str) -> dict[str, str]:
    """Return {"--a": "1", "--b": ""} for `--a 1 --b`."""
    by_flag: dict[str, str] = {}
    flag = ""
    for word in shlex.split(text):
        if word.startswith("--"):
            flag = word
            by_flag[flag] = ""
        else:
            by_flag[flag] = f"{by_flag[flag]} {shlex.quote(word)}".strip()
    return by_flag


def _optimizer(content: Mapping[str, Any], module: ModuleType) -> OptimizerTraits:
    """Return the optimizer that the file chooses, or else the one that is used without a flag."""
    default = OPTIMIZERS[options_by_name()["optimizer"].default]
    for name, value in leaves(content):
        flags = split_flags(_translate_key(name, value, module, {}, default).flags)
        if "--optimizer" in flags:
            return OPTIMIZERS[flags["--optimizer"]]
    return default


def _translate_key(name: str, value: Any, module: ModuleType, facts: dict[str, int], optimizer: OptimizerTraits) -> Key:
    meaning = module.TABLE.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
    if meaning is None:
        return Key(name, value, "unknown", reason="not a key that this tool knows")
    if value == "auto" and not (isinstance(meaning, Cases) and "auto" in meaning.by_value):
        return Key(name, value, "none", reason="filled in by another program; give the flag itself")
    if isinstance(meaning, OfOptimizer):
        meaning = _argument(meaning, optimizer)
    key = _apply(name, value, meaning, facts)
    if key.became == "flags" and name in module.IMPLIED:
        key = replace(key, reason=module.IMPLIED[name])
    return key


def _apply(name: str, value: Any, meaning: Meaning, facts: dict[str, int]) -> Key:
    while isinstance(meaning, Cases):
        meaning = meaning.by_value.get(_text(value).lower(), meaning.otherwise)
    match meaning:
        case Default(reason):
            return Key(name, value, "default", reason=reason)
        case NoCounterpart(reason):
            return Key(name, value, "none", reason=reason)
        case Launch(template):
            return Key(name, value, "launch", reason=template.format(_text(value)))
        case Fact(fact):
            return _note_fact(name, value, fact, facts)
        case Flags(template, convert):
            try:
                values = [_text(convert(item)) for item in (value if isinstance(value, list) else [value])]
                return Key(name, value, "flags", template.format(*_fill(template, values)))
            except (ValueError, TypeError, IndexError):
                return Key(name, value, "unknown", reason=f"{value!r} is no value that can be read")
    raise AssertionError(f"{name}: {meaning!r}")


def _argument(meaning: OfOptimizer, optimizer: OptimizerTraits) -> Meaning:
    fields = optimizer.arguments.get(meaning.argument)
    if fields is None:
        return Default(f"--optimizer {optimizer.name} does not read it")
    if isinstance(fields, str):
        return Flags(f"{flag_of(fields)} {{}}")
    return Flags(" ".join(f"{flag_of(name)} {{{index}}}" for index, name in enumerate(fields)))


def _fill(template: str, values: list[str]) -> list[str]:
    quoted = [shlex.quote(value) for value in values]
    return quoted * template.count("{}") if "{}" in template else quoted


def _note_fact(name: str, value: Any, fact: str, facts: dict[str, int]) -> Key:
    try:
        size = int(value)
        if isinstance(value, float) and size != value:
            raise ValueError
    except (ValueError, TypeError):
        return Key(name, value, "unknown", reason=f"{value!r} is not an integer")
    if facts.setdefault(fact, size) != size:
        raise ConfigurationError(f"{name} {size} contradicts another key, which says {facts[fact]}; keep one of them")
    return Key(name, value, "layout", reason=fact.replace("_", " "))


def _shadow(key: Key, shadowed: Mapping[str, str], present: set[str]) -> Key:
    winner = shadowed.get(key.name)
    if winner is None or winner not in present or key.became != "flags":
        return key
    return Key(key.name, key.value, "none", reason=f"{winner} takes its place in that program too")


def _contained(key: Key, flag: str, reason: str) -> Key:
    return Key(key.name, key.value, "default", reason=reason) if key.flags.split()[:1] == [flag] else key


def _of_data(key: Key, data: axolotl.PreparedData) -> Key:
    if key.name not in data.reasons:
        return key
    return Key(key.name, key.value, "none" if key.name in data.unread else "data", reason=data.reasons[key.name])


def _of_epochs(
    key: Key, command: dict[str, str], layout: Layout, samples_of_epoch: Callable[[int, str], int] | None
) -> Key:
    """Return passes over the data as steps, where all that it takes is known, and add the flag to `command`."""
    if key.name != "num_epochs" or samples_of_epoch is None:
        return key
    if "--train-iters" in command:
        return replace(key, reason="max_steps takes its place in that program too")
    batch, length = layout.global_batch_size, command.get("--seq-length")
    if batch is None or length is None:
        missing = "--world-size" if batch is None else "sequence_len"
        return replace(key, reason=f"the steps of an epoch follow from the batch and the length: give {missing}")
    samples = samples_of_epoch(int(length), command.get("--split") or str(options_by_name()["split"].default))
    steps = max(1, math.ceil(float(key.value) * samples / batch))
    command["--train-iters"] = str(steps)
    said = f"{key.value} x {samples} samples of {length} tokens / {batch}"
    return replace(key, became="flags", flags=f"--train-iters {steps}", reason=said)


def _unsharded(key: Key) -> Key:
    """Return no counterpart for a number of shards alone, which shards nothing here, and say what would."""
    if (key.became, key.reason) != ("layout", "shard"):
        return key
    return replace(key, reason="shard; no flag above shards anything: add --use-torch-fsdp2 (or take fewer ranks)")


def _refused(key: Key) -> Key:
    """Return the key as it is, or without counterpart where our own parser refuses the flag."""
    refusal = _refusal(key.flags)
    return key if refusal is None else Key(key.name, key.value, "none", reason=refusal)


def _refusal(flags: str) -> str | None:
    try:
        parse(shlex.split(flags))
    except ConfigurationError as error:
        return "; ".join(error.problems)
    return None


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)
