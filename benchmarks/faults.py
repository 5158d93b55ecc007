"""Runs every test that docs/faults.md names, and writes how long each row's tests took.

    python benchmarks/faults.py --output benchmarks/results --write

Tests that are marked slow are among them; all parameters of a test are run, one file after another, each in a pytest
of its own. --write puts the seconds, and the number of tests that passed, into the last column of the page. The exit
code is 1 if a test failed; then the page stays as it is.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import ROOT, heading, keep, sentence

PAGE = ROOT / "docs" / "faults.md"
NAMED = re.compile(r"`([a-z]+/(?:\w+/)*test_\w+\.py)::(\w+)`")


@dataclass(frozen=True)
class Taken:
    """What became of one test function, with all its parameters."""

    passed: int
    failed: int
    seconds: float
    """Seconds by the clock, with what its fixtures took."""


def rows(text: str) -> list[tuple[int, list[tuple[str, str]]]]:
    """Return the number of each line of the page that is a row with tests, and these tests: file and function."""
    found = [(number, NAMED.findall(line)) for number, line in enumerate(text.splitlines()) if line.startswith("|")]
    return [(number, tests) for number, tests in found if tests]


def run(file: str, functions: Iterable[str]) -> dict[str, Taken]:
    """Run these functions of one file of tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        nodes = [f"tests/{file}::{function}" for function in functions]
        words = [sys.executable, "-m", "pytest", "-n", "0", "--all", "-q", f"--junitxml={report}", *nodes]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    taken = {}
    for function in functions:
        own = [case for case in cases if (case.get("name") or "").split("[")[0] == function]
        failed = [case for case in own if case.find("failure") is not None or case.find("error") is not None]
        seconds = sum(float(case.get("time") or "nan") for case in own)
        taken[function] = Taken(len(own) - len(failed), len(failed), seconds)
    return taken


def cell(tests: Iterable[tuple[str, str]], taken: dict[tuple[str, str], Taken]) -> str:
    """Return what the last column says of a row."""
    own = [taken[test] for test in tests]
    return f"{sum(each.passed for each in own)} in {sum(each.seconds for each in own):.1f} s"


def written(text: str, taken: dict[tuple[str, str], Taken]) -> str:
    """Return the page with the last column of every row anew."""
    lines = text.splitlines()
    for number, tests in rows(text):
        lines[number] = f"{lines[number].rsplit('|', 2)[0]}| {cell(tests, taken)} |"
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the tests and keep what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="folder to keep the results in")
    parser.add_argument("--write", action="store_true", help="write the last column of docs/faults.md")
    options = parser.parse_args()
    about, text = heading(), PAGE.read_text(encoding="utf-8")
    tests = dict.fromkeys(test for _, of_row in rows(text) for test in of_row)
    taken: dict[tuple[str, str], Taken] = {}
    for file in dict.fromkeys(file for file, _ in tests):
        found = run(file, [function for of, function in tests if of == file])
        taken |= {(file, function): of_one for function, of_one in found.items()}
        for function, of_one in found.items():
            print(f"{file}::{function}: {of_one.passed} passed, {of_one.failed} failed, {of_one.seconds:.1f} s")
    failed = [test for test, of_one in taken.items() if of_one.failed or not of_one.passed]
    if options.output is not None:
        record = {**about, "tests": {"::".join(test): vars(of_one) for test, of_one in taken.items()}}
        table = "".join(
            f"| {file}::{function} | {of_one.passed} | {of_one.failed} | {of_one.seconds:.1f} |\n"
            for (file, function), of_one in taken.items()
        )
        head = f"# The tests of docs/faults.md, {about['date']}\n\n{sentence(record)}\n\n"
        keep(
            options.output, "faults", record, f"{head}| test | passed | failed | seconds |\n|---|---|---|---|\n{table}"
        )
    if options.write and not failed:
        PAGE.write_text(written(text, taken), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
