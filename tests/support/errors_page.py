"""docs/errors.md, made from what the program really answers."""

import dataclasses
import re
import shlex
from typing import Any
from unittest import mock

from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.train import configure as configuring
from megatron_ext.train.configure import configure, gather_facts
from tests.support.wrong_flags import BASE, EXAMPLES, SEVERAL, UNREADABLE

_INTRODUCTION = f"""\
<!-- Generated from the program's answers by `python tools/make_docs.py`. -->
# Wrong flags, and what the program answers

Every problem of a command line is reported at once, before any process group is made: exit code 64 within two seconds.
Each message names the flags, their values, and a setting that works. The examples add their flags to this launch, which
works:

```
megatron-ext pretrain {BASE}
```
"""


def facts_of_any_machine(*args: Any) -> Facts:
    """What is found outside of the flags on a machine with a compiler, and without GPUs and optional packages."""
    found = gather_facts(*args)
    launched = None if found.world_size is None else 1
    return dataclasses.replace(
        found, world_size=launched, cuda_available=False, packages=frozenset(), missing_compiler=None
    )


def answers(flags: str) -> list[str]:
    """The problems that the program finds in the base launch with these flags added; the same on every machine."""
    try:
        with mock.patch.object(configuring, "gather_facts", facts_of_any_machine):
            configure(shlex.split(f"{BASE} {flags}"))
    except ConfigurationError as error:
        return error.problems
    return []


def combinations() -> list[str]:
    """Titles of the examples that combine ways to share the work: those with a flag of the layout."""
    own = {flag_of(field.name) for field in dataclasses.fields(LayoutConfig)} - {"--world-size", "--device"}
    return [title for title, example in EXAMPLES.items() if own & set(shlex.split(example.flags))]


def _combinations_table() -> str:
    lines = ["## Layouts that cannot be combined", "", "| what | because |", "| --- | --- |"]
    for title in combinations():
        anchor = re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        reason = answers(EXAMPLES[title].flags)[0].replace("|", "\\|")
        lines.append(f"| [{title}](#{anchor}) | {reason} |")
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    parts = [_INTRODUCTION, _combinations_table()]
    wrong = {title: example.flags for title, example in EXAMPLES.items()}
    for title, flags in {**wrong, **UNREADABLE, "Several at once": SEVERAL}.items():
        parts.append(f"## {title}\n\n`{flags}`\n\n```\n" + "\n".join(answers(flags)) + "\n```\n")
    return "\n".join(parts)
