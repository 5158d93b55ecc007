"""Flags of other programs, which plugins bring to the extension point `other_flags`: options that are no fields of our
schema, each accepted with a warning or refused by name, and other spellings of our flags and values.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_ext.registry import brought


@dataclass(frozen=True)
class OtherOption:
    """One option of another program that is no field of the schema."""

    flag: str
    reason: str
    accepted: bool
    most_values: int
    neutral: str | None
    """Values that ask for nothing, separated by `;`."""
    needs_value: bool = False
    costs: bool = False
    """Whether the option would make the run faster or smaller."""
    refused_values: Mapping[str, str] = field(default_factory=dict)
    """Values of an accepted flag that are refused -> why."""

    @property
    def warning(self) -> str:
        """The warning that a run prints when it accepts this option."""
        return f"{self.flag} {'saves' if self.costs else 'changes'} nothing here: {self.reason}"

    def is_neutral(self, values: list[str]) -> bool:
        """Return whether these values ask for nothing (`--context-parallel-size 1`), so that the flag may pass
        silently."""
        typed = " ".join(values)
        return self.neutral is not None and any(_same(typed, one) for one in self.neutral.split(";"))


def _same(typed: str, neutral: str) -> bool:
    if typed == neutral:
        return True
    try:
        return float(typed) == float(neutral)
    except ValueError:
        return False


@dataclass(frozen=True)
class OtherFlags:
    """Flags of other programs, with the messages about them."""

    instead: Mapping[str, str] = field(default_factory=dict)
    """Refused flag, with hyphens -> advice what to do instead."""

    translated: Mapping[str, str] = field(default_factory=dict)
    """Flag that a translator reads, with its value -> its meaning here."""

    options: Callable[[], Mapping[str, OtherOption]] = dict
    """Makes flag -> option, for options that are no fields of the schema."""

    spellings: Mapping[str, tuple[str, str | None]] = field(default_factory=dict)
    """Flag -> field, and the value that the flag stands for; None where the flag takes the field's own value."""

    implied: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Flag of `spellings` -> values of further fields that it implies, unless a flag sets them."""

    values: Mapping[tuple[str, str], tuple[str, str | None]] = field(default_factory=dict)
    """Field and value -> the value that is taken instead, and, where that works differently to the same end, how."""


def advice(flag: str) -> str | None:
    """Return advice for a refused flag of another program; None for any other flag."""
    return next((text for one in brought("other_flags") if (text := one.instead.get(flag.replace("_", "-")))), None)


def translated() -> dict[str, str]:
    """Return the flags of other programs that are read, each with its meaning here."""
    return {flag: text for one in brought("other_flags") for flag, text in one.translated.items()}


def other_options() -> dict[str, OtherOption]:
    """Return flag -> option, for all options that are no fields of the schema."""
    return {flag: option for one in brought("other_flags") for flag, option in one.options().items()}


def find_option(flag: str) -> OtherOption | None:
    """Return the option behind a flag that is no field of the schema; None where no other program has it."""
    return next((found for one in brought("other_flags") if (found := one.options().get(flag))), None)


def find_spelling(flag: str) -> tuple[str, str | None] | None:
    """Return the field behind another spelling, and the value that it stands for if it takes none; None for another
    flag."""
    return next((found for one in brought("other_flags") if (found := one.spellings.get(flag))), None)


def implied_values(flag: str) -> Mapping[str, Any]:
    """Return the values of further fields that another spelling implies, unless a flag sets them."""
    return next((found for one in brought("other_flags") if (found := one.implied.get(flag))), {})


def taken_value(field: str, text: str) -> tuple[str, str | None]:
    """Return the value that is taken for a text (the text itself if it is no other spelling), and how that value works
    differently; None if it does not.

    `taken_value("tokenizer_type", "Llama2Tokenizer")` is `("SentencePieceTokenizer", None)`: Megatron 0.19 builds one
    and the same tokenizer for both.
    """
    return next((found for one in brought("other_flags") if (found := one.values.get((field, text)))), (text, None))
