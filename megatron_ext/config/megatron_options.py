"""Finds Megatron's own options that are not fields of our schema: each is accepted with a warning, or refused by name.

Launch scripts written for Megatron-LM name many of its roughly 850 options. None may be misread or silently dropped,
so each is listed in `megatron_accepted.py` or `refused/` with the number of values that it takes.
"""

import functools
from dataclasses import dataclass

from megatron_ext.config.megatron_accepted import ACCEPTED
from megatron_ext.config.refused import REFUSED

_MANY = 1_000_000


@dataclass(frozen=True)
class MegatronOption:
    """One option of Megatron that is no field of the schema."""

    flag: str
    reason: str
    accepted: bool
    most_values: int
    neutral: str | None

    def is_neutral(self, values: list[str]) -> bool:
        """Return whether these values ask for nothing (`--context-parallel-size 1`), so that the flag may pass
        silently."""
        given = " ".join(values)
        if self.neutral is None or given == self.neutral:
            return given == self.neutral
        try:
            return float(given) == float(self.neutral)
        except ValueError:
            return False


def find(flag: str) -> MegatronOption | None:
    """Return the option behind a flag, if Megatron has it and the schema does not."""
    return megatron_options().get(flag)


@functools.cache
def megatron_options() -> dict[str, MegatronOption]:
    """Return flag -> option, for all of them."""
    found: dict[str, MegatronOption] = {}
    for table, accepted in ((ACCEPTED, True), (REFUSED, False)):
        for reason, flags in table:
            for entry in " ".join(flags.split()).split(", "):
                option = _read_entry(entry, reason, accepted)
                assert option.flag not in found, f"{option.flag} is listed twice"
                found[option.flag] = option
    return found


def _read_entry(entry: str, reason: str, accepted: bool) -> MegatronOption:
    flag, *rest = entry.split(" ")
    neutral = None
    most_values = 0
    for word in rest:
        if word.startswith("="):
            neutral = word.removeprefix("=")
        else:
            most_values = _MANY if word == "N..." else 1
    return MegatronOption(flag, reason, accepted, most_values, neutral)
