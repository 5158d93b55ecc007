"""Finds Megatron's own options that are not fields of our schema: each is accepted with a warning, or refused by name.

Launch scripts written for Megatron-LM name many of its roughly 850 options. None may be misread or silently dropped, so
each is in one of four classes: supported (a field of the schema), an old spelling (`old_spellings.py`, or an alias in
the schema), of no bearing here (`megatron_accepted.py`: one warning line says what happens instead), or refused
(`refused.py`: it would change the training or the saved files). The last two are listed with the number of values that
they take. Options of earlier releases and forks (`earlier_options.py`) are accepted with a warning too, or refused by
value.
"""

import functools
from dataclasses import dataclass, replace

from megatron_ext.config.compat import megatron_accepted
from megatron_ext.config.compat.earlier_options import EARLIER, REFUSED_OF_FORKS, SLOWER_OR_LARGER
from megatron_ext.config.compat.megatron_accepted import ACCEPTED
from megatron_ext.config.compat.refused import REFUSED

_MANY = 1_000_000


@dataclass(frozen=True)
class MegatronOption:
    """One option of Megatron that is no field of the schema."""

    flag: str
    reason: str
    accepted: bool
    most_values: int
    neutral: str | None
    """Values that ask for nothing, separated by `;`."""
    needs_value: bool = False
    costs: bool = False
    """Whether the option would make the run faster or smaller."""

    @property
    def warning(self) -> str:
        """The warning that a run prints when it accepts this option."""
        return f"{self.flag} {'saves' if self.costs else 'changes'} nothing here: {self.reason}"

    def refused_value(self, values: list[str]) -> str | None:
        """Return why these values of an accepted flag are refused; None where they are not."""
        return _REFUSED_VALUES.get((self.flag, " ".join(values)))

    def is_neutral(self, values: list[str]) -> bool:
        """Return whether these values ask for nothing (`--context-parallel-size 1`), so that the flag may pass
        silently."""
        typed = " ".join(values)
        return self.neutral is not None and any(_same(typed, one) for one in self.neutral.split(";"))


_REFUSED_VALUES = {
    ("--dataloader-type", "external"): (
        "a loader of one's own is given to pretrain(datasets=...), as docs/extending.md shows; leave it out"
    )
}
"""Values of flags that otherwise change nothing here -> why they do."""


def _same(typed: str, neutral: str) -> bool:
    if typed == neutral:
        return True
    try:
        return float(typed) == float(neutral)
    except ValueError:
        return False


def find(flag: str) -> MegatronOption | None:
    """Return the option behind a flag, if Megatron has it, or had it, and the schema does not."""
    return megatron_options().get(flag) or earlier_options().get(flag)


@functools.cache
def megatron_options() -> dict[str, MegatronOption]:
    """Return flag -> option, for all of them."""
    costly = _costly(megatron_accepted.SLOWER_OR_LARGER)
    return _read_tables((ACCEPTED, True), (REFUSED, False)) | costly


@functools.cache
def earlier_options() -> dict[str, MegatronOption]:
    """Return flag -> option, for those that Megatron no longer has, or that a fork has."""
    costly = _costly(SLOWER_OR_LARGER)
    return _read_tables((EARLIER, True), (REFUSED_OF_FORKS, False)) | costly


def _costly(table: tuple[tuple[str, str], ...]) -> dict[str, MegatronOption]:
    return {flag: replace(one, costs=True) for flag, one in _read_tables((table, True)).items()}


def _read_tables(*tables: tuple[tuple[tuple[str, str], ...], bool]) -> dict[str, MegatronOption]:
    by_flag: dict[str, MegatronOption] = {}
    for table, accepted in tables:
        for reason, flags in table:
            for entry in " ".join(flags.split()).split(", "):
                option = _read_entry(entry, reason, accepted)
                assert option.flag not in by_flag, f"{option.flag} is listed twice"
                by_flag[option.flag] = option
    return by_flag


def _read_entry(entry: str, reason: str, accepted: bool) -> MegatronOption:
    flag, *rest = entry.split(" ")
    neutral = None
    most_values = 0
    for word in rest:
        if word.startswith("="):
            neutral = word.removeprefix("=")
        else:
            most_values = _MANY if word == "N..." else 1
    return MegatronOption(flag, reason, accepted, most_values, neutral, needs_value="N" in rest)
