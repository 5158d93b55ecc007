"""Do the tests catch what people break? Plants one small mistake after another and runs the tests that execute it.

    python tools/mutate.py record --lines lines.jsonl                       # once: which tests execute which lines
    python tools/mutate.py try megatron_ext/train/step.py --lines lines.jsonl --output found.jsonl --each 20
    python tools/mutate.py try --planted mistakes.jsonl --lines lines.jsonl --output found.jsonl    # those of a file
    python tools/mutate.py again --lines lines.jsonl --output found.jsonl   # those that survived, with today's tests
    python tools/mutate.py table                                            # writes docs/mutations.md

The working tree is copied; nothing is planted in it. A mutant is tried in a fork of a process that has everything
loaded, so that one takes as long as the first test that fails, and is caught, too, when its tests hang. Each line of
--output has the file, the line, the operator, the text and what it became, the outcome and the test that has caught it.
All modes may be interrupted (--seconds) and go on where they were when they are started again.

Exit codes: 0 done, 64 the flags cannot work.
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import ConfigurationError
from tests.mutation.page import BEGIN, END, PAGE, whole_page
from tests.mutation.trial import (
    ROOT,
    chosen_mutants,
    planted_by_hand,
    read_recorded,
    read_results,
    record,
    try_mutants,
)


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    options = _parser().parse_args(argv)
    {"record": _record, "try": _try, "again": _again, "table": _table}[options.action](options)
    return 0


def _parser() -> ToolParser:
    parser = ToolParser("Plant small mistakes, and see whether the tests catch them.")
    parser.add_argument("action", choices=("record", "try", "again", "table"))
    parser.add_argument("files", nargs="*", metavar="FILE", help="of the package; for record, files of tests")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="which tests execute which lines, from record")
    parser.add_argument("--output", type=Path, metavar="FILE", help="results, one JSON line for each mutant")
    parser.add_argument("--planted", type=Path, metavar="FILE", help="mistakes to try, a JSON line for each")
    parser.add_argument("--each", type=int, default=10, metavar="N", help="mutants of each file; default 10")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="chooses the mutants; default 0")
    parser.add_argument("--without", action="append", default=[], metavar="OPERATOR", help="none of this; repeatable")
    parser.add_argument("--budget", type=float, default=45.0, metavar="S", help="seconds of tests for each; default 45")
    parser.add_argument("--seconds", type=float, default=1e6, metavar="S", help="begin nothing after so long")
    parser.add_argument("--light", action="store_true", help="no test of these loads torch: a start takes a second")
    return parser


def _record(options: Namespace) -> None:
    every = (
        path for folder in ("unit", "distributed", "parity") for path in (ROOT / "tests" / folder).glob("test_*.py")
    )
    tests = options.files or sorted(str(path.relative_to(ROOT)) for path in every)
    record(tests, _given(options, "lines"), seconds=options.seconds, light=options.light)


def _try(options: Namespace) -> None:
    output, recorded = _given(options, "output"), read_recorded(_given(options, "lines"))
    mutants = chosen_mutants(options.files, options.each, options.seed, recorded, options.without)
    mutants += [] if options.planted is None else planted_by_hand(options.planted)
    done = read_results(output)
    left = [mutant for mutant in mutants if mutant not in done]
    try_mutants(left, recorded, output, budget=options.budget, seconds=options.seconds, light=options.light)


def _again(options: Namespace) -> None:
    output, recorded = _given(options, "output"), read_recorded(_given(options, "lines"))
    survivors = [mutant for mutant, row in read_results(output).items() if row["outcome"] != "caught"]
    try_mutants(survivors, recorded, output, budget=options.budget, seconds=options.seconds, light=options.light)


def _table(_options: Namespace) -> None:
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    PAGE.write_text(f"{head}{BEGIN}\n{whole_page()}\n{END}{tail}", encoding="utf-8")


def _given(options: Namespace, name: str) -> Path:
    value = getattr(options, name)
    if value is None:
        raise ConfigurationError(f"{options.action} needs --{name} FILE")
    return value


if __name__ == "__main__":
    run_tool(main)
