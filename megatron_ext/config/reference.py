"""Makes the command line as text: what tests/golden/cli.txt pins, and the pages docs/flags.md and docs/errors.md
show."""

from megatron_ext.config.help_text import default_text
from megatron_ext.config.megatron_options import megatron_options
from megatron_ext.config.options import Option, options


def pinned_command_line() -> str:
    """Return one line per flag: name, type, default, choices. It changes only when a flag does."""
    lines = [f"{option.flag} | {_type_text(option)} | {option.default!r} | {_choices(option)}" for option in options()]
    aliases = [f"{alias} = {option.flag}" for option in options() for alias in option.aliases]
    program = ["--config | str", "--dry-run | switch", "--help, -h | switch", "--version | switch"]
    return "\n".join([*program, *lines, *aliases]) + "\n"


def flags_page() -> str:
    """Return docs/flags.md: every flag by group, and what becomes of Megatron's other options."""
    accepted = [known for known in megatron_options().values() if known.accepted]
    refused = [known for known in megatron_options().values() if not known.accepted]
    lines = [
        "# Flags",
        "",
        "Written by `python tests/golden/regenerate.py` from `megatron_ext/config/schema`. A flag keeps Megatron's",
        "name, meaning and default where Megatron has one. The same names, with underscores, go into a `--config`",
        "file; the command line wins over it. A switch that the file sets is taken back by `--switch=false`.",
        "",
        "| program | |",
        "|---|---|",
        "| `--config FILE` | YAML file with any of the names below. |",
        "| `--dry-run` | Check everything, print the layout, and exit. |",
        "| `--help`, `--version` | Show it and exit. |",
    ]
    group = ""
    for option in options():
        if option.group != group:
            group = option.group
            lines += ["", f"## {group.capitalize()}", "", "| flag | default | meaning |", "|---|---|---|"]
        names = ", ".join(f"`{flag}`" for flag in (option.flag, *option.aliases))
        value = f" {_type_text(option)}" if not option.is_switch else ""
        lines.append(f"| {names}{value} | {default_text(option) or '-'} | {option.help}{_choice_sentence(option)} |")
    lines += [
        "",
        "## Megatron's other options",
        "",
        f"{len(accepted)} are accepted with one warning line, because they change nothing here; {len(refused)} are",
        "refused by name. A refused option passes silently at a value that asks for nothing, such as",
        "`--fim-rate 0.5`.",
    ]
    for title, known_options in (("Accepted with a warning", accepted), ("Refused", refused)):
        lines += ["", f"### {title}", ""]
        reasons: dict[str, list[str]] = {}
        for known in known_options:
            reasons.setdefault(known.reason, []).append(f"`{known.flag}`")
        lines += [f"- {reason}: {', '.join(flags)}" for reason, flags in reasons.items()]
    return "\n".join(lines) + "\n"


def _type_text(option: Option) -> str:
    if option.is_switch:
        return "switch"
    return option.type.__name__ + (" ..." if option.many else "")


def _choices(option: Option) -> str:
    return ",".join(map(str, option.choices)) if option.choices else "-"


def _choice_sentence(option: Option) -> str:
    return f" One of {', '.join(f'`{choice}`' for choice in option.choices)}." if option.choices else ""
