#!/usr/bin/env python3
"""Write the pages of docs/ that the code makes in a second, and that are therefore not committed: flags.md lists every
flag, errors.md what the program answers to wrong ones, formats.md the files that it writes. In huggingface.md, which is
committed, the table of families is written anew.

    python tools/make_docs.py              # into docs/
    python tools/make_docs.py FOLDER

Exit codes: 0 done, 64 the folder is not there.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.plugins.megatron_lm.reference import flags_page
from tests.support.errors_page import errors_page
from tests.support.families_page import with_families_table
from tests.support.formats_page import formats_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"flags.md": flags_page, "errors.md": errors_page, "formats.md": formats_page}


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Write the pages of docs/ that the code makes.")
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs", help="default: docs of this checkout")
    folder = parser.parse_args(argv).folder
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder; make it first")
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")
        print(f"wrote {folder / name}")
    if (committed := folder / "huggingface.md").is_file():
        committed.write_text(with_families_table(committed.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote the table of families in {committed}")
    return 0


if __name__ == "__main__":
    run_tool(main)
