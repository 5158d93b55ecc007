"""Flags of other programs, which plugins bring to the extension point `other_flags`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_ext.registry import brought


@dataclass(frozen=True)
class OtherFlags:
    """What is said of flags of other programs."""

    instead: Mapping[str, str] = field(default_factory=dict)
    """Flag that is refused, with hyphens -> what to do instead."""

    translated: Mapping[str, str] = field(default_factory=dict)
    """Flag that a translator reads, with its value -> what it is taken for."""


def advice(flag: str) -> str | None:
    """Return what to do instead of a flag of another program; None for a flag that is not one."""
    return next((text for one in brought("other_flags") if (text := one.instead.get(flag.replace("_", "-")))), None)


def translated() -> dict[str, str]:
    """Return the flags of other programs that are read, each with what it is taken for."""
    return {flag: text for one in brought("other_flags") for flag, text in one.translated.items()}
