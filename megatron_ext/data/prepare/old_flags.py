"""Takes flags of Megatron-LM's preprocess_data.py that have no bearing here, or refuses them by name.

add_old_flags(parser)
options = parser.parse_args(argv)
for warning in old_flags(options): ...
"""

import argparse
from collections.abc import Iterator

from megatron_ext.errors import ConfigurationError

_ORDER = "documents are written in the order of the input, whatever encodes them"
_SENTENCES = "documents are not split into sentences"

_TAKEN: dict[str, tuple[str | None, str]] = {
    "--partitions": ("N", "the output is one pair of files, and --workers says how many processes encode"),
    "--keep-sequential-samples": (None, _ORDER),
    "--keep-newlines": (None, _SENTENCES),
    "--lang": ("LANGUAGE", _SENTENCES),
    "--dataset-impl": ("KIND", "there is one format, .bin and .idx, which training reads"),
    "--chunk-size": ("N", "documents are handed to the processes by size"),
}
"""Flag -> the placeholder of its value (None for a switch), and what happens instead of what it says."""

_REFUSED: dict[str, tuple[str | None, str]] = {
    "--split-sentences": (None, f"{_SENTENCES}, which a GPT does not take; leave it out"),
    "--find-optimal-num-workers": (None, "no number of processes is searched for; use --workers"),
    "--workers-to-check": ("N ...", "no number of processes is searched for; use --workers"),
    "--max-documents": ("N", "no number of processes is searched for; use --workers"),
}


def add_old_flags(parser: argparse.ArgumentParser) -> None:
    """Add these flags to a parser, whose help does not show them."""
    for flag, (value, _) in (_TAKEN | _REFUSED).items():
        if value is None:
            parser.add_argument(flag, action="store_true", default=None, help=argparse.SUPPRESS)
        else:
            parser.add_argument(flag, nargs="+" if "..." in value else None, help=argparse.SUPPRESS)


def old_flags(options: argparse.Namespace) -> Iterator[str]:
    """Yield a warning for each of these flags that is given.

    Raises:
        ConfigurationError: one is given that asks for other documents than are written.
    """
    refused = [f"{flag} is not supported: {why}" for flag, (_, why) in _REFUSED.items() if _is_given(options, flag)]
    if refused:
        raise ConfigurationError(refused)
    for flag, (_, instead) in _TAKEN.items():
        if _is_given(options, flag):
            yield f"{flag} changes nothing here: {instead}"


def _is_given(options: argparse.Namespace, flag: str) -> bool:
    return getattr(options, flag.removeprefix("--").replace("-", "_")) is not None
