"""Flags of other programs, which plugins bring to the extension point `other_flags`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ext.registry import brought


@dataclass(frozen=True)
class OtherFlags:
    """Flags of other programs, with the messages about them."""

    instead: Mapping[str, str] = field(default_factory=dict)
    """Refused flag, with hyphens -> advice what to do instead."""

    translated: Mapping[str, str] = field(default_factory=dict)
    """Flag that a translator reads, with its value -> its meaning here."""


def advice(flag: str) -> str | None:
    """Return advice for a refused flag of another program; None for any other flag."""
    return next((text for one in brought("other_flags") if (text := one.instead.get(flag.replace("_", "-")))), None)


def translated() -> dict[str, str]:
    """Return the flags of other programs that are read, each with its meaning here."""
    return {flag: text for one in brought("other_flags") for flag, text in one.translated.items()}
