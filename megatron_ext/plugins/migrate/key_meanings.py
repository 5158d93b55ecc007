"""Defines the meanings that a key of another program's configuration can have here; the tables of this folder consist
of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import mul
from typing import Any

from megatron_ext.config.derived.optimizers import OPTIMIZERS
from megatron_ext.config.parse.options import options_by_name
from megatron_ext.errors import listed


@dataclass(frozen=True)
class Flags:
    """Flags of ours; `{}` stands for the value, `{0}`, `{1}` for the values of a list."""

    template: str
    convert: Callable[[Any], Any] = field(default=lambda value: value)


@dataclass(frozen=True)
class Default:
    """Says that the program does this in any case, or does not do it without a flag: there is nothing to write."""

    reason: str


@dataclass(frozen=True)
class NoCounterpart:
    """Says that no flag of ours does this, and why the training does not depend on it: it concerns speed, memory that
    the program saves in its own way, or output."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """Says that nothing here does this, although the training depends on it: the import ends with exit code 64. The
    reason says what to do instead, if anything."""

    reason: str


@dataclass(frozen=True)
class Fact:
    """A number of the layout, from which sizes are computed: see `parallel_sizes.Layout`."""

    name: str
    per: str | None = None
    """Key whose value divides this number, as the length of a sequence divides a batch of tokens."""
    number: int | None = None
    """The number, where the value of the key is none, but means one."""


@dataclass(frozen=True)
class Launch:
    """Something that torchrun is told, not the program; `{}` stands for the value."""

    template: str
    convert: Callable[[Any], Any] = field(default=lambda value: value)


@dataclass(frozen=True)
class Cases:
    """Says that the meaning depends on the value, written as text in lower case (true, false, null)."""

    by_value: Mapping[str, "Meaning"]
    otherwise: "Meaning"


@dataclass(frozen=True)
class Depends:
    """Says that the meaning depends on the value of another key of the file, written as in `Cases`; a key that the file
    does not have is null."""

    key: str
    by_value: Mapping[str, "Meaning"]
    otherwise: "Meaning"


@dataclass(frozen=True)
class Each:
    """Says that every value of a list has this meaning."""

    meaning: "Meaning"


@dataclass(frozen=True)
class Combined:
    """Flags whose value follows from the key's value and the value of another key: the first of `others` that the file
    has."""

    template: str
    others: tuple[str, ...]
    combine: Callable[[float, float], float] = mul


@dataclass(frozen=True)
class OfOptimizer:
    """An argument of the optimizer that the same file chooses, by the name that torch has for it (`betas`), or one of
    the numbers that the argument is made of."""

    argument: str
    index: int | None = None


Meaning = Flags | Default | NoCounterpart | Refused | Fact | Launch | Cases | Depends | Each | Combined | OfOptimizer

Table = Mapping[str, Meaning]
"""Meanings by key. Nested keys are joined by dots, `*` stands for the index in a list, and a key that has no entry of
its own has the first that matches it as a file name's pattern does (`trl.*`, `lora_*`)."""

OFF = Default("off, as without a flag")


NEITHER = Refused("neither true nor false")


def switch(flags: str) -> Cases:
    """Return flags where the value is true, nothing where it is false."""
    return Cases({"true": Flags(flags), "false": OFF, "null": OFF}, NEITHER)


def only_off(reason: str) -> Cases:
    """Return nothing to write where the value is false, empty or "none"; else a refusal."""
    off: dict[str, Meaning] = dict.fromkeys(("false", "null", "none", "no", "0", ""), OFF)
    return Cases(off, Refused(reason))


def same_flags(names: str, prefix: str = "") -> dict[str, Meaning]:
    """Return our flag of the same name for every key, given as words; a value that is our default needs no flag."""
    return {f"{prefix}{name}": same_flag(name) for name in names.split()}


def same_flag(name: str) -> Meaning:
    """Return our flag of the same name, and nothing to write where the value is our default."""
    option = options_by_name()[name]
    if option.is_switch:
        return switch(option.flag)
    usual = OFF if option.default is None else Default("our default, too")
    by_value: dict[str, Meaning] = {value_text(option.default).lower(): usual}
    return Cases(by_value, Flags(f"{option.flag} {{}}"))


def only(values: str, reason: str, prefix: str = "") -> dict[str, Meaning]:
    """Return, for words such as `key=value`, nothing to write where the key has that value, and else a refusal; without
    a value the key has to be off."""
    pairs = (word.partition("=") for word in values.split())
    return {
        f"{prefix}{key}": Cases({value: OFF, "null": OFF}, Refused(reason)) if equals else only_off(reason)
        for key, equals, value in pairs
    }


def value_text(value: Any) -> str:
    """Return a value as a command line and `Cases` have it: JSON's words, and whole numbers without a point."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return str(value)


def above_one(meaning: Meaning) -> Cases:
    """Return nothing to write where the size is 1, which divides nothing."""
    return Cases({"1": OFF}, meaning)


def each_of(keys: str, meaning: Meaning, prefix: str = "") -> dict[str, Meaning]:
    """Return one meaning for several keys, whose names are given as words."""
    return {f"{prefix}{key}": meaning for key in keys.split()}


def whole_number(value: Any) -> int:
    """Return an integer that a file gives as a number or as its text.

    Raises:
        ValueError: it is no integer.
    """
    if not isinstance(value, bool | int | float | str) or isinstance(value, bool):
        raise ValueError
    if isinstance(value, float) and not value.is_integer():
        raise ValueError
    return int(value)


def count_from(least: int) -> Callable[[Any], int]:
    """Return a function that takes an integer of at least this from a file.

    It raises ValueError for anything else.
    """

    def counted(value: Any) -> int:
        number = whole_number(value)
        if number < least:
            raise ValueError
        return number

    return counted


FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers {}"
FULL_SHARD = Flags("--use-torch-fsdp2")
# Weights are sharded too, but stay whole from a layer's forward pass to its backward pass.
SHARD_GRAD = Flags("--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward")

ZERO_STAGE = Cases(
    {
        "0": Default("plain data parallelism, as without a flag"),
        "1": Flags("--use-distributed-optimizer"),
        "2": SHARD_GRAD,
        "3": FULL_SHARD,
    },
    Refused("ZeRO has the stages 0 to 3"),
)

WEIGHTS_WHOLE = Default("ZeRO divides weights in stage 3 alone, and can offload them then")

MIXED_PRECISION = Cases(
    {
        "bf16": Flags("--bf16"),
        "fp16": Flags("--fp16"),
        "fp8": Flags("--bf16 --fp8-format hybrid"),
        "no": Default("fp32, as without a flag"),
        "false": Default("fp32, as without a flag"),
    },
    Refused("not a precision that this tool knows; write bf16, fp16 or no"),
)


def optimizers(program: str) -> Cases:
    """Return the optimizers that are here, by their names in another program."""
    known = {
        name: Flags(f"--optimizer {traits.name} {traits.elsewhere[program].flags}".strip())
        for traits in OPTIMIZERS.values()
        if program in traits.elsewhere
        for name in traits.elsewhere[program].names
    }
    ours = (f"{traits.name} ({traits.remark})" if traits.remark else traits.name for traits in OPTIMIZERS.values())
    return Cases(known, Refused(f"choose one of --optimizer {listed(ours)}"))


PLAIN_DECODER = "--position-embedding-type rope --disable-bias-linear --attention-dropout 0 --hidden-dropout 0"
"""Flags of a Llama that its program says nowhere in the file."""

NORMS_WITHOUT_DECAY = "weights of norms, and biases, have no decay here, which they have there"

TEXT_BEFORE = NoCounterpart("text becomes tokens once, before training: megatron-ext preprocess, then --data-path")
WITHOUT_TRANSFORMER_ENGINE = NoCounterpart(
    "layers run on torch; --transformer-impl transformer_engine takes Transformer Engine's, where it is installed"
)
SHOWN = NoCounterpart("what is named, shown and measured changes nothing of the training")

CHECKPOINTS = Default(
    "checkpoints are sharded and load into any layout; `megatron-ext convert to-hf` writes the whole model"
)
RESUMED = Cases({"false": OFF, "true": Refused("the folder to go on from is named by --load")}, Flags("--load {}"))
SAME_NUMBERS = NoCounterpart("how ranks of a sequence exchange keys and values is --cp-comm-type: the same numbers")
EPOCHS = NoCounterpart(
    "the length of a run is --train-iters or --train-samples: with --data-path PREFIX of the preprocessed data this "
    "tool says how many steps that is"
)


_HYBRID = Refused(
    "how many replicas of the shards there are does not stand in the file: write FULL_SHARD, and add "
    "--num-distributed-optimizer-instances N"
)
_NO_SHARD = Default("plain data parallelism, as without a flag")

FSDP_VERSION = Cases({"2": Flags("--use-torch-fsdp2"), "1": FULL_SHARD}, Refused("FSDP has the versions 1 and 2"))

# torch.distributed.fsdp.ShardingStrategy numbers them from 1.
_STRATEGIES = {
    "full_shard": FULL_SHARD,
    "shard_grad_op": SHARD_GRAD,
    "no_shard": _NO_SHARD,
    "hybrid_shard": _HYBRID,
    "hybrid_shard_zero2": _HYBRID,
}

_FSDP_KEYS = {
    "version": FSDP_VERSION,
    "sharding_strategy": Cases(
        _STRATEGIES | {str(number): meaning for number, meaning in enumerate(_STRATEGIES.values(), start=1)},
        Refused("not a strategy of torch's FSDP"),
    ),
    "reshard_after_forward": Cases(
        {
            "true": Default("weights are freed after the forward pass of a layer"),
            "false": Flags("--torch-fsdp2-no-reshard-after-forward"),
            # Accelerate keeps version 1's names for it.
            "full_shard": FULL_SHARD,
            "shard_grad_op": SHARD_GRAD,
            "no_shard": _NO_SHARD,
            "hybrid_shard": _HYBRID,
        },
        NEITHER,
    ),
    "auto_wrap_policy": Cases(
        {"transformer_based_wrap": Default("every transformer layer is a unit of sharding")},
        NoCounterpart("every transformer layer is a unit of sharding; there is no other division"),
    ),
    "transformer_layer_cls_to_wrap": Default("every transformer layer is a unit of sharding; it need not be named"),
    "min_num_params": NoCounterpart("every transformer layer is a unit of sharding, whatever its size"),
    "backward_prefetch": Default("the next layer's weights are fetched while this one computes"),
    "backward_prefetch_policy": Default("the next layer's weights are fetched while this one computes"),
    "forward_prefetch": Cases(
        {"true": Default("the next layer's weights are fetched while this one computes")},
        NoCounterpart("the next layer's weights are fetched while this one computes; it cannot be turned off"),
    ),
    "cpu_offload": switch("--use-torch-fsdp2 --torch-fsdp2-cpu-offload"),
    "offload_params": switch("--use-torch-fsdp2 --torch-fsdp2-cpu-offload"),
    "cpu_offload_pin_memory": Cases(
        {"true": Default("host memory is pinned on a GPU machine"), "false": Flags("--no-pin-cpu-params")},
        NEITHER,
    ),
    "state_dict_type": CHECKPOINTS,
    "final_state_dict_type": CHECKPOINTS,
    "sync_module_states": Default("weights are a function of the seed and the parameter's name: equal on every rank"),
    "cpu_ram_efficient_loading": Default("every rank reads its own slices alone"),
    "use_orig_params": Default("parameters keep their names and shapes"),
    "activation_checkpointing": switch(FULL_RECOMPUTE.format(1)),
    "activation_checkpointing_offload": NoCounterpart("recomputed layers keep their one input on their own device"),
    "ignored_modules": only_off("every module is sharded"),
    "mixed_precision_policy": Cases({"bf16": OFF, "fp32": OFF}, Refused("--bf16 or --fp16 is the precision of all")),
}

FSDP = {f"fsdp_config.{prefix}{name}": meaning for name, meaning in _FSDP_KEYS.items() for prefix in ("", "fsdp_")}
"""Keys of `fsdp_config`, which Accelerate and Axolotl share but for a prefix."""
