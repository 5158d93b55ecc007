"""Declares a configuration field and the command-line flag that it becomes in one place.

`num_layers: int = option(12, "Number of transformer layers.", resume="shape")` becomes `--num-layers N`. The flag's
name is always the field's name with hyphens; the same name (with underscores) is the key in a `--config` YAML file.
The annotation decides the type: `bool` is a switch, `T | None` is optional, `tuple[T, ...]` takes several values.

Every other fact about a field is an argument of `option` as well: its resume role, which every field must have, its
bounds, and the values that it needs of other fields. No other list of names repeats them.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

MOST = 10**15
"""Largest integer, of whatever sign, that any flag takes: more than the tokens of any run."""

Resume = Literal["shape", "function", "curve", "tokenizer", "free"]
"""Resume role: the effect of another value on a resume.

shape: another value cannot load the weights, and is refused.
function: another value computes something else from the same weights; it is refused without --finetune.
curve: learning rate and weight decay follow it; --use-checkpoint-opt-param-scheduler takes the checkpoint's.
tokenizer: --use-checkpoint-args takes the checkpoint's with the model, where no tokenizer is named.
free: it may change: the layout, how training continues (length, batch, dropout, the auxiliary losses), what is logged.
"""


@dataclasses.dataclass(frozen=True)
class Need:
    """A value that another field must have."""

    field: str
    value: Any
    words: str
    """The value in words, for the message "needs <words>, but --field is ..."."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """A value that a plugin adds to the choices of a field of the core, or to the letters that its text may have."""

    field: str
    value: Any
    needs: tuple[Need, ...] = ()
    words: str = ""
    """Meaning of the value, which replaces `{choices}` in the help of the field."""


@dataclasses.dataclass(frozen=True)
class ReadWith:
    """A condition on other fields without which a field is not read."""

    fields: str | tuple[str, ...]
    """The other field, or several, of which one must meet the condition."""
    words: str
    """Why the field is not read otherwise, for the warning "--flag changes nothing here: <words>"."""
    only: tuple[Any, ...] | None = None
    """Values of the other field with which the field is read; None: every value that is not in `but`."""
    but: tuple[Any, ...] = (None, False, 0)
    """Values of the other field with which the field is not read."""
    letters: str = ""
    """Letters of --hybrid-layer-pattern whose layers read the field."""

    @property
    def any_of(self) -> tuple[str, ...]:
        """Names of the other fields, as a tuple."""
        return (self.fields,) if isinstance(self.fields, str) else self.fields

    def holds(self, field: str, value: Any) -> bool:
        """Return whether a field is read with this value of the other one, `field`."""
        if field == "hybrid_layer_pattern":
            return not {*self.letters}.isdisjoint(value or "")
        return value in self.only if self.only is not None else value not in self.but


def option(
    default: Any,
    help: str,
    *,
    resume: Resume,
    required: str | None = None,
    at_least: int | None = None,
    at_most: int | None = None,
    positive: bool = False,
    share: bool = False,
    saves_memory: bool = False,
    choices: Sequence[Any] | None = None,
    refused: Mapping[Any, str] | None = None,
    needs: Mapping[Any, Sequence[Need]] | None = None,
    metavar: str | None = None,
    aliases: Sequence[str] = (),
    joined: bool = False,
    repeats: bool = False,
    read_with: ReadWith | Sequence[ReadWith] = (),
    dropped_unread: bool = False,
    turns_on_a_plugin: bool = False,
    packages: Mapping[Any, str] | None = None,
    needs_gpu: Sequence[Any] = (),
    untried_with_graphs: bool = False,
    computed_by_ours: bool = False,
    unread_on_cpu: str = "",
) -> Any:
    """Declare one field of the configuration.

    Args:
        default: the value when the user says nothing; `None` on an optional field means "resolve derives it".
        help: one sentence, with the unit; shown by `--help`.
        resume: the field's resume role.
        required: where the user must give it, a value that the message about a missing one names as an example.
        at_least: the least value.
        at_most: the largest value, if it is smaller than `MOST`: for numbers that the configuration counts one by one.
        positive: whether values must be above 0.
        share: whether values must be at least 0 and below 1.
        saves_memory: whether it only says how memory is saved: no result depends on it beyond rounding.
        choices: the accepted values, if they are a closed set; plugins may bring more (`Choice`).
        refused: value of Megatron's that is not among the choices -> why not, for the message and the page of flags.
        needs: value -> the values of other fields that it needs; `rules.run_rules.values_have_what_they_need` checks
            them.
        metavar: the placeholder in `--help`.
        aliases: further spellings of the flag that Megatron accepts.
        joined: whether several words are one text, as a shell makes them of one that stands in an array.
        repeats: whether the flag may be given again, which adds values.
        read_with: conditions on other fields, all of which must hold for this one to have an effect; without them, a
            given value gets a warning.
        dropped_unread: whether the typed value is dropped where it has no effect, because rules would refuse it by
            itself. Other values stay as typed: a checkpoint may hold the same, and rules judge them in any case.
        packages: value -> the package that it needs; None: every value but the default needs it.
        needs_gpu: values that only a GPU can do.
        untried_with_graphs: whether CUDA graphs were only tried with the default.
        computed_by_ours: whether only this program's own layers compute it, so that --transformer-impl is local.
        unread_on_cpu: why it changes nothing with --device cpu, if only GPUs read it.
        turns_on_a_plugin: whether it has an effect only where a plugin that brings it as a switch is installed.
    """
    metadata = {
        "help": help,
        "resume": resume,
        "required": required,
        "at_least": at_least,
        "at_most": at_most,
        "positive": positive,
        "share": share,
        "saves_memory": saves_memory,
        "choices": tuple(choices) if choices is not None else None,
        "refused": tuple((refused or {}).items()),
        "needs": tuple((value, need) for value, needed in (needs or {}).items() for need in needed),
        "metavar": metavar,
        "aliases": tuple(aliases),
        "joined": joined,
        "repeats": repeats,
        "read_with": (read_with,) if isinstance(read_with, ReadWith) else tuple(read_with),
        "dropped_unread": dropped_unread,
        "turns_on_a_plugin": turns_on_a_plugin,
        "packages": tuple((packages or {}).items()),
        "needs_gpu": tuple(needs_gpu),
        "untried_with_graphs": untried_with_graphs,
        "computed_by_ours": computed_by_ours,
        "unread_on_cpu": unread_on_cpu,
    }
    return dataclasses.field(default=default, metadata=metadata)


free = functools.partial(option, resume="free")
"""`option` for a field that may change on resuming. A field of the model names its role in full instead."""
