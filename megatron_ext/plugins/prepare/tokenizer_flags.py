"""The tokenizer flags of `megatron-ext pretrain`, from the same schema, for the programs in tools/."""

import argparse
import functools
from typing import Any

from megatron_ext.config.parse.options import Option, options, options_by_name
from megatron_ext.config.parse.other_flags import taken_value

NAMES = tuple(option.name for option in options() if option.resume == "tokenizer" or option.name == "vocab_size")


def add_tokenizer_flags(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """Add the flags to a tool's parser; with `required`, --tokenizer-type must be given."""
    for name in NAMES:
        option = options_by_name()[name]
        parser.add_argument(
            option.flag,
            *option.aliases,
            type=functools.partial(_value, option),
            nargs="+" if option.many else None,
            choices=option.choices,
            default=option.default,
            required=required and name == "tokenizer_type",
            help=option.help,
        )


def tokenizer_values(options: object) -> dict[str, Any]:
    """Return the values of these flags, by field name: of a tool's options, or of a job."""
    values = {name: getattr(options, name) for name in NAMES}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def _value(option: Option, text: str) -> Any:
    return option.type(taken_value(option.name, text)[0])
