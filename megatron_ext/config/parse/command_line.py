"""Reads a command line: by the schema, or by a translator of a plugin where a flag of another program stands in it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_ext.config.parse import arguments
from megatron_ext.config.parse.arguments import Typed
from megatron_ext.registry import brought, load


@dataclass(frozen=True)
class Translator:
    """A reader of command lines that were written for other programs."""

    marks: frozenset[str]
    """Flags, with hyphens, that mean something else in the other program; the reader is called only if one is given."""

    read: str
    """"module:function" of the reader, which returns `Typed` as `read` does."""


def read(argv: Sequence[str]) -> Typed:
    """Return the typed values and their problems, as `config.parse.arguments.read`."""
    flags = {word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")}
    translator = next((one for one in brought("translators") if flags & one.marks), None)
    typed = arguments.read(argv) if translator is None else load(translator.read)(argv)
    return replace(typed, words=tuple(argv))
