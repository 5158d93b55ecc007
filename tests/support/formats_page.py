"""Makes docs/formats.md: the files that the program writes, from the code that writes them."""

import ast
import re
from pathlib import Path

from megatron_ext import errors
from megatron_ext.plugins.pages.markup import code, table

_PACKAGE = Path(errors.__file__).parent
_FILES = (
    ("Tokens: `.bin` and `.idx`", "data/indexed.py"),
    ("What is trained on: `.mask`", "data/mask.py"),
    ("The manifest of a dataset", "data/data_manifest.py"),
    ("A checkpoint's folder", "checkpoint/native/checkpoint_folder.py"),
    ("The manifest of a checkpoint", "checkpoint/native/checkpoint_manifest.py"),
    ("A snapshot of one rank", "plugins/snapshots/rank_file.py"),
    ("How a run ended: `exit.json`", "resilience/exit_record.py"),
    ("How a run was started: `commands.jsonl`", "telemetry/commands_file.py"),
)
_FIELD = re.compile(r"^    (\w+): ([^#\n]+?)(?: = [^#\n]+)?(?:  # (.*))?$")


def formats_page() -> str:
    """Return the page as text."""
    lines = [
        "<!-- Generated from the sources of megatron_ext by `python tools/make_docs.py`. -->",
        "# Files and exit codes",
        "",
        "## Exit codes",
        "",
        *table(["code", "meaning"], [["0", "The run is done."], *_exit_codes()]),
        "",
    ]
    for title, path in _FILES:
        lines += [f"## {title}", "", _docstring(path), "", f"*megatron_ext/{path}*", ""]
    lines += ["## The metrics file: `metrics.jsonl`", "", _docstring("telemetry/metrics_file.py"), ""]
    for title, name in (("A row of a step", "StepMetrics"), ("A row of an evaluation", "ValidationMetrics")):
        lines += [f"### {title}", "", *table(["field", "type", "meaning"], _fields(name)), ""]
    return "\n".join(lines)


def _docstring(path: str) -> str:
    return ast.get_docstring(ast.parse((_PACKAGE / path).read_text(encoding="utf-8"))) or ""


def _exit_codes() -> list[list[str]]:
    """Return code and first sentence of each error that has a code of its own."""
    classes = [each for each in vars(errors).values() if isinstance(each, type) and "exit_code" in vars(each)]
    rows = [[str(each.exit_code), (each.__doc__ or "").split("\n")[0]] for each in classes]  # pyright: ignore[reportAttributeAccessIssue]
    return [row for row in rows if row[0] != "1"]


def _fields(name: str) -> list[list[str]]:
    """Return name, type and remark of each field of a dataclass of telemetry/metrics.py."""
    source = (_PACKAGE / "telemetry/metrics.py").read_text(encoding="utf-8")
    body = source.split(f"class {name}:\n")[1].split("\n\n\n")[0]
    found = [_FIELD.match(line) for line in body.split("\n")]
    return [[code(each[1]), code(each[2].strip()), each[3] or ""] for each in found if each]
