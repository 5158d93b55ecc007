"""Makes the text of `--help`: the usual flags, all, or those that have to do with a word, by group, with defaults."""

import itertools
import re
import textwrap
from collections.abc import Sequence

from megatron_ext.config.parse.options import Option, options
from megatron_ext.config.parse.other_flags import other_options, translated
from megatron_ext.config.parse.usual_flags import USUAL

_USAGE = """\
usage: megatron-ext pretrain [--config run.yaml] [flags]

Pretrain a GPT model. Start it as one process, or as many with torchrun. Flags win over the --config file, and that
over a --recipe.
"""

PROGRAM = (
    ("--config FILE", "YAML file with any of the names below (underscores for hyphens)."),
    ("--recipe NAME", "A published model with a layout, read as a --config file; megatron-ext recipes lists them."),
    (
        "--dry-run",
        "Check everything, print the layout and its memory, and exit. The layout is judged, not this machine: GPUs, "
        "packages and data that are not here are believed, with a warning.",
    ),
    ("--device-memory-gb X", "With --dry-run: whether a rank fits in this memory; exit code 1 where it does not."),
    ("--device-name TEXT", "With --dry-run: the same for a device by name (h200, h100, a100)."),
    ("--allow-unknown-flags", "Leave out flags that nobody here knows, with a warning for each."),
    (
        "--help, -h [all|WORD]",
        "Show the flags that most launches use, all flags, or the flags that have to do with words, and exit.",
    ),
    ("--version", "Show the version and exit."),
)
"""Flags of the program itself, each with its sentence."""


def version() -> str:
    """Return the text of `--version`."""
    from importlib import metadata  # with it comes a parser of e-mails, which nothing else here waits for

    try:
        return f"megatron-ext {metadata.version('megatron-ext')}"
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "megatron-ext (not installed)"


_EXAMPLES = """
examples:
  megatron-ext pretrain --help all           # all flags
  megatron-ext pretrain --help rope scaling  # the flags that have to do with these words
  megatron-ext pretrain --config run.yaml --dry-run --world-size 64
  torchrun --nproc-per-node 8 --max-restarts 3 -m megatron_ext pretrain --config run.yaml --save ckpt --load ckpt
  megatron-ext pretrain --device cpu --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \\
      --position-embedding-type rope --mock-data --vocab-size 512 --micro-batch-size 4 --global-batch-size 4 \\
      --train-iters 20 --lr 1e-3 --log-interval 1
"""


def about(words: Sequence[str]) -> str:
    """Return the text of `--help` followed by these words: by none the usual flags, by `all` every flag.

    Other words are looked up at the beginnings of words of the names, groups and sentences of the flags, and of the
    names of other flags that Megatron-LM and its forks have, with their treatment; words that hyphens join are
    looked up in names alone. Where no flag has all of the words, the flags with the most of them in their names are
    shown, else the flags with the nearest names.
    """
    wanted = [one.lower() for word in words for one in re.split(r"[^\w]+|_", word) if one]
    if not wanted:
        return text([option for option in options() if option.flag.removeprefix("--") in USUAL])
    return text(options()) if wanted == ["all"] else _found(" ".join(words), wanted)


def _found(asked: str, wanted: Sequence[str]) -> str:
    is_name = bool(wanted[1:]) and " " not in asked
    matching = [one for one in options() if _has(_names(one) if is_name else _searched(one), wanted)]
    others = [one for one in other_options().values() if _has(one.flag, wanted)]
    theirs = {flag: text for flag, text in translated().items() if _has(flag, wanted)}
    if not matching and not others and not theirs:
        matching = [] if is_name else _named(wanted)
    if not matching and not others and not theirs:
        import difflib  # as for what an unknown flag meant: nobody else waits for it

        names = [option.flag.removeprefix("--") for option in options()]
        close = difflib.get_close_matches("-".join(wanted), names, n=3, cutoff=0.6)
        hint = f"; near it: {', '.join(f'--{name}' for name in close)}" if close else ""
        return f"no flag speaks of {asked!r}{hint}. --help all lists every flag."
    lines = _by_group(matching)
    if theirs:
        lines += [*([""] if lines else []), "taken as scripts of Megatron-DeepSpeed mean it:"]
        lines += itertools.chain(*(_entry(flag, text) for flag, text in theirs.items()))
    for title, accepted in (("taken, without effect", True), ("not supported", False)):
        entries = [_entry(one.flag, one.reason) for one in others if one.accepted is accepted]
        lines += [*([""] if lines and entries else []), *([f"{title}:"] if entries else [])]
        lines += itertools.chain(*entries)
    return "\n".join(lines)


def _has(searched: str, wanted: Sequence[str]) -> bool:
    """Return whether each wanted word begins a word of the text."""
    begins = re.split(r"[^\w]+|_", searched.lower())
    return all(any(one.startswith(word) for one in begins) for word in wanted)


def _named(words: Sequence[str]) -> list[Option]:
    """Return the options that have the most of these words in their names; none where no name has any."""
    found = {option.name: sum(_has(option.flag, [one]) for one in words) for option in options()}
    most = max(found.values())
    return [option for option in options() if most and found[option.name] == most]


def _names(option: Option) -> str:
    return " ".join((option.flag, *option.aliases))


def _searched(option: Option) -> str:
    return " ".join((_names(option), option.group, option.help, *map(str, option.choices or ())))


def _by_group(shown: Sequence[Option]) -> list[str]:
    lines: list[str] = []
    for group, of_group in itertools.groupby(shown, lambda option: option.group):
        lines += [*([""] if lines else []), f"{group}:", *itertools.chain(*map(_option, of_group))]
    return lines


def text(shown: Sequence[Option]) -> str:
    """Return the text with the program's flags and these, 120 columns wide."""
    lines = [_USAGE, "program:"]
    for flag, sentence in PROGRAM:
        lines += _entry(flag, sentence)
    lines += ["", *_by_group(shown)]
    if len(shown) < len(options()):
        lines += [
            "",
            f"These are the {len(shown)} flags that most launches use; --help all shows all {len(options())}.",
        ]
    lines += [
        _EXAMPLES.rstrip(),
        "",
        "Defaults are in brackets. Exit codes: 0 done, 64 configuration, 65 data, 70 numeric, 74 storage,",
    ]
    lines += ["75 stopped by a signal and saved, 76 a peer was lost."]
    return "\n".join(lines)


def default_text(option: Option) -> str:
    """Return the default as a user would type it; empty for switches and for values that are derived or optional."""
    if option.default is None:
        return "required" if option.required else ""
    if option.is_switch:
        return ""
    return f"{option.default:g}" if isinstance(option.default, float) else str(option.default)


def _option(option: Option) -> list[str]:
    names = ", ".join((option.flag, *option.aliases))
    return _entry(f"{names} {option.metavar}".rstrip(), _sentence(option))


def _sentence(option: Option) -> str:
    default = default_text(option)
    return f"{option.help} [{default}]" if default else option.help


def _entry(flag: str, sentence: str) -> list[str]:
    wrapped = textwrap.wrap(sentence, 74, break_on_hyphens=False)
    if len(flag) <= 41:
        head = f"  {flag:<42}  {wrapped[0]}"
        return [head, *(" " * 46 + line for line in wrapped[1:])]
    # A long list of choices breaks after a comma.
    head = textwrap.wrap(flag.replace(",", ", "), 118, initial_indent="  ", subsequent_indent=" " * 6)
    return [*(line.replace(", ", ",") for line in head), *(" " * 46 + line for line in wrapped)]
