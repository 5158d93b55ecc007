"""Translates another program's configuration file, key by key, into flags of ours.

    result = translate("axolotl", read("config.yaml"))
    result.command        # {"--lr": "2e-05", "--bf16": "", ...}
    result.keys           # what became of every key; none is dropped
    result.problems()     # the keys that the training depends on and that have no flag

A flag that this version refuses is not printed: the parser's own reason takes its place.
"""

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any

from megatron_ext.config.derived.optimizer_traits import OptimizerTraits
from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.derived.sharding import FLAGS
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import flag_of, options_by_name
from megatron_ext.errors import ConfigurationError, listed
from megatron_ext.plugins.migrate import (
    accelerate,
    axolotl,
    deepspeed,
    megatron_bridge,
    nanotron,
    olmo_core,
    torchtitan,
)
from megatron_ext.plugins.migrate.key_meanings import (
    Cases,
    Combined,
    Default,
    Depends,
    Each,
    Fact,
    Flags,
    Launch,
    Meaning,
    NoCounterpart,
    OfOptimizer,
    Refused,
    Table,
    count_from,
    value_text,
    whole_number,
)
from megatron_ext.plugins.migrate.parallel_sizes import Layout, solve
from megatron_ext.untrusted.text import load_json, read_file
from megatron_ext.untrusted.yaml_text import MOST_YAML, load_yaml

SOURCES: dict[str, ModuleType] = {
    "deepspeed": deepspeed,
    "accelerate": accelerate,
    "axolotl": axolotl,
    "megatron-bridge": megatron_bridge,
    "olmo-core": olmo_core,
    "nanotron": nanotron,
    "torchtitan": torchtitan,
}
"""Modules with the meanings of each program's keys. One may have `normalized(content)`, which puts a file into the form
whose keys its table names."""


@dataclass(frozen=True)
class Key:
    """Records what became of one key: its flags, or why there are none."""

    name: str
    value: Any
    became: str
    """One of KINDS."""
    flags: str = ""
    reason: str = ""
    fix: str = "change it in the file, or leave it out there and see to it yourself"
    """Fix to suggest where the key is refused."""


KINDS = {
    "flags": "flags",
    "layout": "sizes of the layout",
    "launch": "given to torchrun",
    "data": "given to megatron-ext preprocess",
    "default": "needs no flag",
    "none": "no counterpart, and none needed",
    "refused": "not translated, although the training depends on it",
}


_WITH_THE_WEIGHTS = "the optimizer's state is in host memory where the weights are"
_CONTAINED = {
    ("--overlap-grad-reduce", "--use-torch-fsdp2"): "FSDP2 reduces while the backward pass still runs",
    ("--optimizer-cpu-offload", "--torch-fsdp2-cpu-offload"): _WITH_THE_WEIGHTS,
    ("--optimizer-offload-fraction", "--torch-fsdp2-cpu-offload"): _WITH_THE_WEIGHTS,
}
"""Pairs of a flag and another one that already includes it -> why."""

_NO_TOML = "TOML, which torchtitan read before 0.3: give the JSON that --debug.save_config_file of a newer one writes"
_UNSCALED = "FSDP2, which bf16 would have here, has no loss scaling, and fp16 needs it"
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

    def problems(self) -> list[str]:
        """Return a sentence for every key that is not translated, although the training depends on it."""
        refused = [key for key in self.keys if key.became == "refused"]
        named = [f"{key.name}: {key.value}" if key.value != "" else key.name for key in refused]
        return [f"{name} is not translated: {key.reason}; {key.fix}" for name, key in zip(named, refused, strict=True)]


@dataclass(frozen=True)
class _File:
    """A file while its keys are translated, one after another."""

    module: ModuleType
    values: Mapping[str, Any]
    """Its values by dotted key, with the defaults of the other program that are not ours."""
    facts: dict[str, int]
    optimizer: OptimizerTraits

    def text(self, key: str) -> str:
        """Return a value as `Cases` names it."""
        return value_text(self.values.get(key)).lower()


def read(path: str) -> dict[str, Any]:
    """Return the content of a JSON or YAML file.

    Raises:
        ConfigurationError: the file cannot be read, is neither JSON nor YAML, names a key twice, or is no mapping.
    """
    try:
        raw = read_file(path, MOST_YAML, pipes=True)
        if path.endswith(".toml"):
            raise ValueError(_NO_TOML)
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

    A key that the training depends on and that is not translated is no error here: `Translation.problems` names it.
    """
    module = SOURCES[source]
    given = dict(leaves(normalized(source, content)))
    left_out = {
        key: value
        for key, (beside, value) in module.DEFAULTS.items()
        if given.get(beside) is not None and given.get(key) is None
    }
    file = _File(module, given | left_out, facts := {}, _optimizer(given, module))
    keys = [_translate_key(name, value, file) for name, value in given.items()]
    by_default = (_translate_key(name, value, file) for name, value in left_out.items())
    keys += [
        replace(key, reason="; ".join(filter(None, ("which leaving it out means there", key.reason))))
        for key in by_default
        if key.became in ("flags", "refused")
    ]
    keys = _with_loss_scale(keys, facts.get("pipeline", 1))
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
    keys += [Key(flags, "", "refused", reason=_refusal(flags) or "") for flags in missing]
    for (flag, other), reason in _CONTAINED.items():
        if other in command and command.pop(flag, None) is not None:
            keys = [_contained(key, flag, reason) for key in keys]
    if "shard" in facts and not _SHARDING & command.keys():
        keys = [_unsharded(key) for key in keys]
    return Translation(tuple(keys), layout, sizes | command, data.commands)


def normalized(source: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a file of the program `source` in the form whose keys the program's table names."""
    change = getattr(SOURCES[source], "normalized", None)
    return content if change is None else change(content)


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


def _optimizer(values: Mapping[str, Any], module: ModuleType) -> OptimizerTraits:
    """Return the optimizer that the file chooses, or else the one that is used without a flag."""
    default = OPTIMIZERS[options_by_name()["optimizer"].default]
    file = _File(module, values, {}, default)
    for name, value in values.items():
        flags = split_flags(_translate_key(name, value, file).flags)
        if "--optimizer" in flags:
            return OPTIMIZERS[flags["--optimizer"]]
    return default


def _meaning(name: str, table: Table) -> Meaning | None:
    name = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return table.get(name) or next((table[pattern] for pattern in table if fnmatchcase(name, pattern)), None)


def _translate_key(name: str, value: Any, file: _File) -> Key:
    meaning = _meaning(name, file.module.TABLE)
    named = meaning.by_value if isinstance(meaning, Cases) else {}
    if (value is None and "null" not in named) or value in ({}, []):
        return Key(name, value, "default", reason="nothing is set")
    if meaning is None:
        return Key(name, value, "refused", reason="not a key that this tool knows")
    if (switch := _switched_off(name, file)) is not None:
        return Key(name, value, "default", reason=f"{switch} is not true")
    if value == "auto" and "auto" not in named and not isinstance(meaning, Default):
        return Key(name, value, "none", reason="filled in by another program; give the flag itself")
    key = _apply(name, value, meaning, file)
    if key.became == "flags" and name in file.module.IMPLIED:
        key = replace(key, reason=file.module.IMPLIED[name])
    if (chosen := split_flags(key.flags).get("--optimizer")) is not None:
        key = replace(key, reason=OPTIMIZERS[chosen].remark)
    # To leave out a key that has its value by default would change nothing.
    return replace(key, fix="write another value into the file") if name in file.module.DEFAULTS else key


def _switched_off(name: str, file: _File) -> str | None:
    """Return the key `enabled` or `enable` of a section around the key that turns the section off; None where all are
    on."""
    parts = name.split(".")
    sections = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    switches = (f"{section}.{word}" for section in sections for word in ("enabled", "enable"))
    off = ("false", "null")
    return next((one for one in switches if one in file.module.TABLE and one != name and file.text(one) in off), None)


def _apply(name: str, value: Any, meaning: Meaning, file: _File) -> Key:
    while isinstance(meaning, Cases | Depends | OfOptimizer):
        if isinstance(meaning, OfOptimizer):
            meaning = _argument(meaning, file.optimizer)
        else:
            text = value_text(value).lower() if isinstance(meaning, Cases) else file.text(meaning.key)
            meaning = meaning.by_value.get(text, meaning.otherwise)
    match meaning:
        case Default(reason):
            return Key(name, value, "default", reason=reason)
        case NoCounterpart(reason):
            return Key(name, value, "none", reason=reason)
        case Refused(reason):
            return Key(name, value, "refused", reason=reason)
        case Fact(fact, per, number):
            return replace(_note_fact(name, value if number is None else number, fact, file, per), value=value)
        case Each(one):
            return _of_all(name, value, [_apply(name, each, one, file) for each in _listed(value)])
        case Combined(template, others, combine):
            other = next((file.values[key] for key in others if file.values.get(key) not in (None, "auto")), None)
            if other is None:
                return Key(name, value, "refused", reason=f"it counts with {listed(others)}, which is not in the file")
            return _filled(name, value, Flags(template, lambda own: f"{combine(float(own), float(other)):.12g}"))
        case _:
            return _filled(name, value, meaning)


def _filled(name: str, value: Any, meaning: Flags | Launch) -> Key:
    """Return the flags of a template, with the value in them."""
    try:
        values = [value_text(meaning.convert(item)) for item in _listed(value)]
        text = meaning.template.format(*_fill(meaning.template, values))
    except (ArithmeticError, ValueError, TypeError, IndexError):
        return Key(name, value, "refused", reason=f"{value!r} is no value that can be read")
    return Key(name, value, "launch", reason=text) if isinstance(meaning, Launch) else Key(name, value, "flags", text)


def _of_all(name: str, value: Any, keys: list[Key]) -> Key:
    """Return the translation of a list from the translations of its values: its kind is the last of KINDS among
    theirs."""
    became = max((key.became for key in keys), key=list(KINDS).index)
    flags = " ".join(filter(None, (key.flags for key in keys)))
    if became != "refused" and flags:
        return Key(name, value, "flags", flags)
    reasons = dict.fromkeys(key.reason for key in keys if key.became == became)
    return Key(name, value, became, reason="; ".join(reasons))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _argument(meaning: OfOptimizer, optimizer: OptimizerTraits) -> Meaning:
    """Return the flags of an argument of the optimizer, or else of the one that updates other parameters in its
    place."""
    found = (traits.arguments[meaning.argument] for traits in optimizer.each if meaning.argument in traits.arguments)
    fields = next(found, None)
    if fields is None:
        return Default(f"--optimizer {optimizer.name} does not read it")
    if isinstance(fields, str):
        return Flags(f"{flag_of(fields)} {{}}")
    if meaning.index is not None:
        return Flags(f"{flag_of(fields[meaning.index])} {{}}")
    return Flags(" ".join(f"{flag_of(name)} {{{index}}}" for index, name in enumerate(fields)))


def _fill(template: str, values: list[str]) -> list[str]:
    quoted = [shlex.quote(value) for value in values]
    return [" ".join(quoted)] * template.count("{}") if "{}" in template else quoted


def _note_fact(name: str, value: Any, fact: str, file: _File, per: str | None) -> Key:
    reason = fact.replace("_", " ")
    try:
        size = whole_number(value)
    except ValueError:
        return Key(name, value, "refused", reason=f"{value!r} is not an integer")
    if per is not None and size > 0:
        try:
            divisor = count_from(1)(file.values.get(per))
        except ValueError:
            return Key(name, value, "refused", reason=f"it counts in units of {per}, which is not in the file")
        if size % divisor:
            return Key(name, value, "refused", reason=f"it is not a multiple of {per}, which is {divisor}")
        size, reason = size // divisor, f"{reason} {size // divisor}, as {per} is {divisor}"
    if file.facts.setdefault(fact, size) != size:
        raise ConfigurationError(
            f"{name} {size} contradicts another key, which says {file.facts[fact]}; keep one of them"
        )
    return Key(name, value, "layout", reason=reason)


def _shadow(key: Key, shadowed: Mapping[str, str], present: set[str]) -> Key:
    winner = shadowed.get(key.name)
    if winner is None or winner not in present or key.became != "flags":
        return key
    return Key(key.name, key.value, "none", reason=f"{winner} takes its place in that program too")


def _with_loss_scale(keys: list[Key], stages: int) -> list[Key]:
    """Return the keys with another scheme in the place of FSDP2 where the file asks for fp16, whose loss FSDP2 cannot
    scale: the Megatron-FSDP scheme that divides the same tensors, or the distributed optimizer where the optimizer is
    in host memory, or the model in pipeline stages."""
    given = {flag for key in keys for flag in split_flags(key.flags)}
    if not {"--fp16", "--use-torch-fsdp2"} <= given:
        return keys
    strategy = "optim_grads" if "--torch-fsdp2-no-reshard-after-forward" in given else "optim_grads_params"
    scheme = f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy}"
    instead = {
        "--use-torch-fsdp2": scheme,
        "--torch-fsdp2-no-reshard-after-forward": "",
        "--torch-fsdp2-cpu-offload": "--optimizer-cpu-offload",
    }
    if stages > 1 or given & {"--optimizer-cpu-offload", "--torch-fsdp2-cpu-offload"}:
        instead["--use-torch-fsdp2"] = "--use-distributed-optimizer"
    return [_instead(key, instead) if instead.keys() & split_flags(key.flags).keys() else key for key in keys]


def _instead(key: Key, instead: Mapping[str, str]) -> Key:
    flags = " ".join(filter(None, (instead.get(word, word) for word in shlex.split(key.flags))))
    return replace(key, became="flags" if flags else "default", flags=flags, reason=_UNSCALED)


def _contained(key: Key, flag: str, reason: str) -> Key:
    return Key(key.name, key.value, "default", reason=reason) if key.flags.split()[:1] == [flag] else key


def _of_data(key: Key, data: axolotl.PreparedData) -> Key:
    if key.name not in data.reasons:
        return key
    return replace(key, became=data.became.get(key.name, "data"), flags="", reason=data.reasons[key.name])


def _of_epochs(
    key: Key, command: dict[str, str], layout: Layout, samples_of_epoch: Callable[[int, str], int] | None
) -> Key:
    """Return passes over the data as steps, where all that it takes is known, and add the flag to `command`."""
    if key.name != "num_epochs" or key.became != "none":
        return key
    try:
        epochs = float(key.value)
    except (ArithmeticError, TypeError, ValueError):
        epochs = math.nan
    if not 0 < epochs < math.inf:
        return replace(key, became="refused", reason=f"{key.value!r} is not a number of epochs")
    if samples_of_epoch is None:
        return key
    if "--train-iters" in command:
        return replace(key, reason="max_steps takes its place in that program too")
    batch, length = layout.global_batch_size, command.get("--seq-length")
    if batch is None or length is None:
        missing = "--world-size" if batch is None else "sequence_len"
        return replace(key, reason=f"the steps of an epoch follow from the batch and the length: give {missing}")
    samples = samples_of_epoch(int(length), command.get("--split") or str(options_by_name()["split"].default))
    steps = max(1, math.ceil(epochs * samples / batch))
    command["--train-iters"] = str(steps)
    said = f"{key.value} x {samples} samples of {length} tokens / {batch}"
    return replace(key, became="flags", flags=f"--train-iters {steps}", reason=said)


def _unsharded(key: Key) -> Key:
    """Return no counterpart for a number of shards alone, which shards nothing here, and say what would."""
    if (key.became, key.reason) != ("layout", "shard"):
        return key
    return replace(key, reason="shard; no flag above shards anything: add --use-torch-fsdp2 (or take fewer ranks)")


def _refused(key: Key) -> Key:
    """Return the key as it is, or refused where our own parser refuses the flag."""
    refusal = _refusal(key.flags)
    return key if refusal is None else Key(key.name, key.value, "refused", reason=refusal)


def _refusal(flags: str) -> str | None:
    try:
        parse(shlex.split(flags))
    except ConfigurationError as error:
        return "; ".join(error.problems)
    return None
