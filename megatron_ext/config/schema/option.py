"""A configuration field and the command-line flag that it becomes, declared in one place.

`num_layers: int = option(12, "Number of transformer layers.")` becomes `--num-layers N`. The flag's name is
always the field's name with hyphens; the same name (with underscores) is the key in a `--config` YAML file.
The annotation decides the type: `bool` is a switch, `T | None` is optional, `tuple[T, ...]` takes several values.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any


def option(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    metavar: str | None = None,
    aliases: Sequence[str] = (),
) -> Any:
    """Declare one field of the configuration.

    Args:
        default: the value when the user says nothing; `None` on an optional field means "resolve derives it".
        help: one sentence, with the unit; shown by `--help`.
        choices: the accepted values, if they are a closed set.
        metavar: the placeholder in `--help`.
        aliases: further spellings of the flag that Megatron accepts.
    """
    metadata = {"help": help, "choices": choices, "metavar": metavar, "aliases": tuple(aliases)}
    return dataclasses.field(default=default, metadata=metadata)
