"""docs/errors.md, made from what the program really answers."""

import shlex

from megatron_ext.errors import ConfigurationError
from megatron_ext.train.configure import configure
from tests.unit.wrong_flags import BASE, EXAMPLES, SEVERAL, UNREADABLE

_INTRODUCTION = f"""\
# Wrong flags, and what the program answers

Written by `python tests/golden/regenerate.py`; a test compares it with the program. Every problem of a command line is
reported at once, before any process group is made: exit code 64 within two seconds. Each message names the flags, their
values, and a setting that works. The examples add their flags to this launch, which works:

```
python pretrain_gpt.py {BASE}
```
"""


def answers(flags: str) -> list[str]:
    """The problems that the program finds in the base launch with these flags added."""
    try:
        configure(shlex.split(f"{BASE} {flags}"))
    except ConfigurationError as error:
        return error.problems
    return []


def errors_page() -> str:
    parts = [_INTRODUCTION]
    wrong = {title: example.flags for title, example in EXAMPLES.items()}
    for title, flags in {**wrong, **UNREADABLE, "Several at once": SEVERAL}.items():
        parts.append(f"## {title}\n\n`{flags}`\n\n```\n" + "\n".join(answers(flags)) + "\n```\n")
    return "\n".join(parts)
