"""Finds Megatron's own options that are not fields of our schema: each is accepted with a warning, or refused by name.

Launch scripts written for Megatron-LM name many of its roughly 850 options. None may be misread or silently dropped, so
each is in one of four classes: supported (a field of the schema), an old spelling (`old_spellings.py`, or an alias in
the schema), of no bearing here (`megatron_accepted.py`: one warning line says what happens instead), or refused
(`refused.py`: it would change the training or the saved files). The last two are listed with the number of values that
they take. Options of earlier releases and forks (`earlier_options.py`) are accepted with a warning too, or refused by
value.
"""

import functools
from dataclasses import replace

from megatron_ext.config.parse.other_flags import OtherFlags, OtherOption
from megatron_ext.plugins.megatron_lm import megatron_accepted
from megatron_ext.plugins.megatron_lm.earlier_options import EARLIER, REFUSED_OF_FORKS, SLOWER_OR_LARGER
from megatron_ext.plugins.megatron_lm.megatron_accepted import ACCEPTED
from megatron_ext.plugins.megatron_lm.old_spellings import EARLIER_FLAGS, FLAGS, IMPLIED, VALUES, VALUES_OF_FORKS
from megatron_ext.plugins.megatron_lm.refused import REFUSED

_MANY = 1_000_000


_REFUSED_VALUES = {
    "--dataloader-type": {
        "external": "a loader of one's own is given to pretrain(datasets=...), as docs/extending.md shows; leave it out"
    }
}
"""Flags that otherwise change nothing here -> values that do, and why."""


@functools.cache
def megatron_options() -> dict[str, OtherOption]:
    """Return flag -> option, for all of them."""
    costly = _costly(megatron_accepted.SLOWER_OR_LARGER)
    return _read_tables((ACCEPTED, True), (REFUSED, False)) | costly


@functools.cache
def earlier_options() -> dict[str, OtherOption]:
    """Return flag -> option, for those that Megatron no longer has, or that a fork has."""
    costly = _costly(SLOWER_OR_LARGER)
    return _read_tables((EARLIER, True), (REFUSED_OF_FORKS, False)) | costly


def _costly(table: tuple[tuple[str, str], ...]) -> dict[str, OtherOption]:
    return {flag: replace(one, costs=True) for flag, one in _read_tables((table, True)).items()}


def _read_tables(*tables: tuple[tuple[tuple[str, str], ...], bool]) -> dict[str, OtherOption]:
    by_flag: dict[str, OtherOption] = {}
    for table, accepted in tables:
        for reason, flags in table:
            for entry in " ".join(flags.split()).split(", "):
                option = _read_entry(entry, reason, accepted)
                assert option.flag not in by_flag, f"{option.flag} is listed twice"
                by_flag[option.flag] = option
    return by_flag


def _read_entry(entry: str, reason: str, accepted: bool) -> OtherOption:
    flag, *rest = entry.split(" ")
    neutral = None
    most_values = 0
    for word in rest:
        if word.startswith("="):
            neutral = word.removeprefix("=")
        else:
            most_values = _MANY if word == "N..." else 1
    return OtherOption(
        flag,
        reason,
        accepted,
        most_values,
        neutral,
        needs_value="N" in rest,
        refused_values=_REFUSED_VALUES.get(flag, {}),
    )


@functools.cache
def _all_options() -> dict[str, OtherOption]:
    return megatron_options() | earlier_options()


OTHER_FLAGS = (
    OtherFlags(
        options=_all_options,
        spellings=EARLIER_FLAGS | FLAGS,
        implied=IMPLIED,
        values=VALUES_OF_FORKS | VALUES,
    ),
)
