"""Writes the table of families in docs/huggingface.md: each row is the docstring of a family's file."""

import importlib
import re

from megatron_ext.plugins import families
from megatron_ext.plugins.families.registry import FAMILIES
from megatron_ext.plugins.pages.markup import table

_TABLE = re.compile(r"^\| family \|.*?\n(?=\n)", re.DOTALL | re.MULTILINE)


def families_table() -> str:
    """Return a row for each family of this folder: its types, its models, and notes on them. A file's docstring begins
    with the models, then a colon and the notes, up to the first empty line."""
    rows = []
    for family in FAMILIES.values():
        try:
            module = importlib.import_module(f"{families.__name__}.{family.model_type.replace('-', '_')}")
        except ModuleNotFoundError:  # of an extension, which has a page of its own
            continue
        models, _, notes = " ".join((module.__doc__ or "").partition("\n\n")[0].split()).partition(": ")
        rows.append([", ".join((family.model_type, *family.other_names)), models, notes.removesuffix(".")])
    return "\n".join(table(["family", "models", "notes"], rows)) + "\n"


def with_families_table(page: str) -> str:
    """Return the text of docs/huggingface.md with the table as it is now."""
    return _TABLE.sub(lambda _: families_table(), page, count=1)
