"""Makes the command line as text: what tests/golden/cli.txt pins, and the pages docs/flags.md and docs/errors.md
show.

Lists the flags whose default is not Megatron's, and why: a column of docs/flags.md.

tests/plugins/megatron_lm/test_megatron_options.py reads Megatron's defaults and fails where another one is not
listed here.
"""

import itertools
from typing import Any, NamedTuple

from megatron_ext.config.parse.help_text import PROGRAM, default_text
from megatron_ext.config.parse.options import Option, flag_of, options
from megatron_ext.plugins.megatron_lm.megatron_options import earlier_options, megatron_options
from megatron_ext.plugins.megatron_lm.old_spellings import EARLIER_FLAGS, FLAGS, IMPLIED, VALUES, VALUES_OF_FORKS
from megatron_ext.plugins.pages.markup import table


class OtherDefault(NamedTuple):
    """Megatron's default of a flag, and why ours is another."""

    theirs: Any
    why: str


OTHER_DEFAULTS = {
    "--num-query-groups": OtherDefault(1, "the same with --group-query-attention; else every head has its own"),
    "--transformer-impl": OtherDefault("transformer_engine", "runs without a build"),
    "--data-parallel-sharding-strategy": OtherDefault(
        "optim_grads_params", "the same, where --use-megatron-fsdp reads it"
    ),
    "--rotary-seq-len-interpolation-factor": OtherDefault(None, "1 stretches nothing, which there is not to give it"),
    "--distributed-backend": OtherDefault("nccl", "the same on GPUs; gloo on CPU processes"),
    "--eval-interval": OtherDefault(None, "there evaluation is off until it is given; here 0 says so"),
    "--moe-layer-freq": OtherDefault(1, "the same, experts in every layer"),
    "--moe-router-load-balancing-type": OtherDefault("aux_loss", "the same, read as one of a list"),
    "--moe-aux-loss-coeff": OtherDefault(0.0, "the same, read as one of a list"),
    "--fp8-recipe": OtherDefault("delayed", "scales are those of the tensor itself, not of the steps before"),
    "--muon-tp-mode": OtherDefault("blockwise", "the curve is the same as on one rank"),
    "--dsa-indexer-loss-coeff": OtherDefault(None, "nothing else trains the indexer"),
    "--split": OtherDefault(None, "the same, which Megatron fills in later"),
}
"""Flags whose default Megatron's parser gives otherwise."""

OTHER_MEANINGS = {
    "--tokenizer-type": OtherDefault(
        "GPT2BPETokenizer", "the same with --vocab-file and --merge-file, which it needs; else it must be named"
    ),
    "--ckpt-fully-parallel-save": OtherDefault("on", "the files of a rank then do not depend on the others"),
    "--exit-signal-handler": OtherDefault("off", "SIGTERM always saves and stops"),
}
"""Flags that nothing is given for in either parser, and that mean something else then."""


def other_default(flag: str) -> OtherDefault | None:
    """Return Megatron's default of a flag where ours is another; None where it is the same."""
    return OTHER_DEFAULTS.get(flag) or OTHER_MEANINGS.get(flag)


def pinned_command_line() -> str:
    """Return one line per flag: name, type, default, choices. It changes only when a flag does."""
    lines = [f"{option.flag} | {_type_text(option)} | {option.default!r} | {_choices(option)}" for option in options()]
    aliases = [f"{alias} = {option.flag}" for option in options() for alias in option.aliases]
    switches = ("--dry-run", "--allow-unknown-flags", "--help, -h", "--version")
    values = ("--config | str", "--device-memory-gb | float", "--device-name | str")
    program = [*values, *(f"{switch} | switch" for switch in switches)]
    return "\n".join([*program, *lines, *aliases]) + "\n"


def flags_page() -> str:
    """Return docs/flags.md: every flag by group, and the treatment of Megatron's other options."""
    accepted = [known for known in megatron_options().values() if known.accepted]
    earlier = [known for known in earlier_options().values() if known.accepted]
    of_forks = [known for known in earlier_options().values() if not known.accepted]
    refused = [known for known in megatron_options().values() if not known.accepted]
    lines = [
        "<!-- Generated from megatron_ext/config/schema by `python tools/make_docs.py`. -->",
        "# Flags",
        "",
        "A flag keeps Megatron's name, meaning and default where Megatron has one. The same names, with underscores,",
        "go into a `--config` file; the command line wins over it. A switch that the file sets is taken back by",
        "`--switch=false`.",
        "",
        *table(["program", ""], ([f"`{flag}`", sentence] for flag, sentence in PROGRAM)),
    ]
    head = ["flag", "default", "meaning", "Megatron's default, where it is another"]
    for group, of_group in itertools.groupby(options(), key=lambda option: option.group):
        lines += ["", f"## {group.capitalize()}", "", *table(head, map(_row, of_group))]
    lines += [
        "",
        "## Megatron's other options",
        "",
        "Every option of Megatron's is in one of four classes: supported (the tables above), an old spelling (taken as",
        f"the new one), of no bearing here ({len(accepted)}: taken, with one warning line that says what happens",
        f"instead), or refused by name ({len(refused)}: it would change what is trained or kept, and is not built). An",
        "option passes silently at a value that asks for nothing, such as `--mask-prob 0.15`. Underscores in a flag",
        "stand for hyphens.",
        "",
        *_old_spellings(),
    ]
    for title, known_options in (
        ("Of no bearing here", accepted),
        ("Of earlier releases and forks, and of no bearing here", earlier),
        ("Refused", refused),
        ("Of forks, and refused", of_forks),
    ):
        lines += ["", f"### {title}", ""]
        reasons: dict[str, list[str]] = {}
        for known in known_options:
            reasons.setdefault(known.reason, []).append(f"`{known.flag}`")
        lines += [f"- {reason}: {', '.join(flags)}" for reason, flags in reasons.items()]
    return "\n".join(lines) + "\n"


def _row(option: Option) -> list[str]:
    names = ", ".join(f"`{flag}`" for flag in (option.flag, *option.aliases))
    value = f" {_type_text(option)}" if not option.is_switch else ""
    return [
        f"{names}{value}",
        default_text(option) or "-",
        f"{option.help}{_choice_sentence(option)}",
        _others(option),
    ]


def _old_spellings() -> list[str]:
    rows: list[list[str]] = []
    for flag, (name, value) in (FLAGS | EARLIER_FLAGS).items():
        besides = "".join(
            f", `{flag_of(other)} {text}`" for other, text in IMPLIED.get(flag, {}).items() if other != name
        )
        unless = " unless other flags say otherwise" if besides else ""
        rows.append([f"`{flag}`", f"`{' '.join(filter(None, (flag_of(name), value)))}`{besides}{unless}"])
    for (name, old), (new, instead) in (VALUES | VALUES_OF_FORKS).items():
        warned = f", with a warning: {instead}" if instead else ""
        rows.append([f"`{flag_of(name)} {old}`", f"`{flag_of(name)} {new}`{warned}"])
    both = "Both may be given where they say the same; with different values they are refused."
    return ["### Old spellings", "", both, "", *table(["old", "taken as"], rows)]


def _others(option: Option) -> str:
    other = other_default(option.flag)
    if other is None:
        return ""
    return f"{'none' if other.theirs is None else f'`{other.theirs}`'}: {other.why}"


def _type_text(option: Option) -> str:
    if option.is_switch:
        return "switch"
    return option.type.__name__ + (" ..." if option.many else "")


def _choices(option: Option) -> str:
    return ",".join(map(str, option.choices)) if option.choices else "-"


def _choice_sentence(option: Option) -> str:
    if not option.choices:
        return ""
    refused = (f" `{value}` is refused: {reason}." for value, reason in option.refused)
    return f" One of {', '.join(f'`{choice}`' for choice in option.choices)}.{''.join(refused)}"
