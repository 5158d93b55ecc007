"""Says what other versions of the libraries change, by name; tools/next_versions.sh starts it.

The versions are installed in an environment of its own. There, in processes of its own, are run: the canaries of the
seams, the layouts of the golden losses, the rows of docs/parity.md that add most choices, and the tests that
docs/libraries.md names. What must be the same is what tests pin for the installed versions: canaries and tests pass,
rows agree with one process, losses are the ones of tests/golden/losses.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import ConfigurationError
from tests.support.losses import golden, layouts
from tests.support.losses.commits import ROOT, cpu_kind, run_jobs, scratch_folder
from tests.support.parity_rows import FIRST

NEWEST = ("torch", "megatron-core", "transformers", "emerging-optimizers", "fla-core")
"""Libraries that are taken in their newest version unless a flag names another one."""

ROWS = 30
CANARIES = ("tests/unit/seams",)
PARITY = "tests/parity/test_matrix.py::test_layout_agrees_with_one_process"
PAGE = ROOT / "docs" / "libraries.md"
LOSSES = ROOT / "tests" / "golden" / "losses"
_NAMED = re.compile(r"`((?:[\w.]+/)*test_\w+\.py)::(\w+)`")
_LONGEST = 300  # characters of a reason


@dataclass(frozen=True)
class Compared:
    """What one of the comparisons found."""

    title: str
    total: int
    changed: Sequence[tuple[str, str]]
    """Name of each thing that changed, and how."""
    notes: Sequence[str] = ()
    """Lines about what does not count as a change."""


def pinned() -> dict[str, str]:
    """Return the requirements of the tests: name of a package -> its line without a comment."""
    files = ("requirements.txt", "requirements-dev.txt")
    lines = [line.partition("#")[0].strip() for name in files for line in (ROOT / name).read_text().splitlines()]
    return {re.split(r"[=\[]", line)[0]: line for line in lines if line and not line.startswith("-")}


def requirements(chosen: Mapping[str, str]) -> list[str]:
    """Return the lines that pip is given.

    Args:
        chosen: name of a package -> version, or `newest`; packages that it leaves out stay as they are pinned.
    """
    return [
        line if name not in chosen else name if chosen[name] == "newest" else f"{name}=={chosen[name]}"
        for name, line in pinned().items()
    ]


def make_environment(folder: Path, lines: Sequence[str]) -> Path:
    """Install `lines` in the virtual environment `folder`/environment, made where it is missing; return its Python.

    Raises:
        ConfigurationError: pip cannot install these versions together; the end of what it said is in the text.
    """
    python = folder / "environment" / "bin" / "python"
    wanted = folder / "requirements.txt"
    folder.mkdir(parents=True, exist_ok=True)
    wanted.write_text("\n".join(lines) + "\n")
    made = [[sys.executable, "-m", "venv", str(folder / "environment")]] * (not python.exists())
    for command in [*made, [str(python), "-m", "pip", "install", "--quiet", "--upgrade", "-r", str(wanted)]]:
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            said = "\n".join(line for line in ended.stderr.splitlines() if "is ignored" not in line)[-2000:]
            raise ConfigurationError(
                f"{said}\nthese versions cannot be installed together; name others, also of packages that stayed as "
                "they are pinned: --NAME VERSION, or --NAME newest"
            )
    return python


def versions_of(python: Path) -> dict[str, str]:
    """Return the versions that an environment has of the packages of `pinned`."""
    program = (
        "import json, sys; from importlib.metadata import version; print(json.dumps([*map(version, sys.argv[1:])]))"
    )
    names = [*pinned()]
    ended = subprocess.run([str(python), "-c", program, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, json.loads(ended.stdout), strict=True))


def changed_versions(found: Mapping[str, str]) -> list[str]:
    """Return a line for each package whose version is another one than is installed here."""
    here = {name: _installed(name) for name in found}
    return [f"{name} {here[name]} -> {new}" for name, new in found.items() if new != here[name]]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(none)"


def run_tests(python: Path, title: str, tests: Sequence[str]) -> Compared:
    """Run tests by an environment's Python and return which of them fail; a run that ends without a report failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=short"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        for name in ("VIRTUAL_ENV", "PYTEST_ADDOPTS"):  # the reasons that are read are those of pytest as it is
            environment.pop(name, None)
        ended = subprocess.run(
            [*command, f"--junitxml={report}", *tests],
            cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        cases = [*ElementTree.parse(report).iter("testcase")] if report.exists() else []
    failed = [*failures(cases)]
    if ended.returncode and not failed:  # it could not begin, a test is not there, or the process died
        said = "\n".join((ended.stdout + ended.stderr).strip().splitlines()[-15:])
        failed = [("all of them", _reason("", said) or f"pytest ended with exit code {ended.returncode}: {said}")]
    skipped = sum(case.find("skipped") is not None for case in cases)
    return Compared(title, len(cases), failed, [f"skipped: {skipped}"] * bool(skipped))


def failures(cases: Sequence[ElementTree.Element]) -> Iterator[tuple[str, str]]:
    """Yield the name of each case of a JUnit report that failed, and the reason.

    The name of a case of a test with parameters is the parameter's where the reason begins with that, as for canaries,
    and where all cases are of one test.
    """
    names = [case.get("name") or case.get("classname") or "" for case in cases]
    is_one_test = len({name.partition("[")[0] for name in names}) == 1
    for name, case in zip(names, cases, strict=True):
        parameter = name.partition("[")[2].removesuffix("]")
        # What a test says of itself comes before what cleaning up after it says.
        for found in [*case.iter("failure"), *case.iter("error")][:1]:
            reason = _reason(found.get("message") or "", found.text or "")
            is_named = bool(parameter) and (is_one_test or reason.startswith(parameter))
            told = parameter if is_named else name
            yield told, reason.removeprefix(told).lstrip(": ")


def _reason(message: str, text: str) -> str:
    """Return the line that says most: the last error in what ranks said, else the first line of the message."""
    errors = re.findall(r"^(?:E\s+)?(\w[\w.]*(?:Error|Exception)\b:.*)$", f"{message}\n{text}", re.MULTILINE)
    own = [line for line in errors if "RankError" not in line]
    first = message.strip().split("\n")[0]
    said = own[-1] if own and not first.startswith(("Failed", "AssertionError")) else first
    said = said.removeprefix("Failed: ")
    used = re.search(r"^Used at .*", message, re.MULTILINE)  # of a canary
    said = said if len(said) <= _LONGEST else f"{said[:_LONGEST]} ..."
    return said if used is None else f"{said.rstrip('.')}. {used[0]}"


def compare_losses(python: Path, versions: Mapping[str, str]) -> Compared:
    """Train the layouts of the golden losses by an environment's Python and return the numbers that differ.

    They must be the same to the bit where torch, megatron-core and the CPU are the ones of the file, elsewhere within
    `golden.TOLERANCE` of themselves.
    """
    kept = json.loads(golden.file_for(LOSSES).read_text())
    expected: golden.Losses = kept.pop("losses")
    same = kept == {**{name: versions[name] for name in ("torch", "megatron-core")}, "cpu": cpu_kind()}
    found: golden.Losses = {}
    changed: list[tuple[str, str]] = []
    with scratch_folder() as scratch:
        for result in run_jobs(ROOT, [*layouts.golden_jobs().values()], scratch, workers=1, python=str(python)):
            if "failed" in result:
                changed.append((result["name"], _reason("", result["failed"]) or result["failed"][-_LONGEST:]))
            else:
                found[result["name"]] = golden.losses_of(result)
    known = {name: expected[name] for name in found}
    total = sum(len(numbers) for fields in expected.values() for numbers in fields.values())
    for line in golden.differences(known, found, 0.0 if same else golden.TOLERANCE):
        name, _, how = line.partition(": ")
        changed.append((name, how))
    bits = len([*golden.differences(known, found, 0.0)])
    notes = [f"{bits} numbers have other bits; a change is more than {golden.TOLERANCE:g} of a number"] * bool(found)
    return Compared("golden losses", total, changed, [] if same else notes)


def parity_rows(count: int) -> list[str]:
    """Return the tests of the rows of docs/parity.md that add most choices of layouts and models, one by one."""
    return [f"{PARITY}[{name}]" for name in FIRST[:count]]


def tests_of_the_page() -> list[str]:
    """Return the tests that docs/libraries.md names, but for the canaries, once each."""
    named = [f"tests/{file}::{test}" for file, test in _NAMED.findall(PAGE.read_text())]
    return [test for test in dict.fromkeys(named) if not test.startswith(CANARIES)]


def lines(changed: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a line for each thing that changed; things that changed in the same way are named after one line."""
    names: dict[str, list[str]] = {}
    for name, how in changed:
        names.setdefault(how, []).append(name)
    for how, same in names.items():
        if len(same) == 1:
            yield f"{same[0]}: {how}"
        else:
            yield from (f"{len(same)} of them: {how}", *(f"  {name}" for name in same))


def _tell(compared: Compared) -> None:
    print(f"\n== {compared.title}: {len(compared.changed)} changed, of {compared.total}")
    for line in (*lines(compared.changed), *(f"({note})" for note in compared.notes)):
        print(line)
    sys.stdout.flush()


def compare(python: Path, rows: int) -> bool:
    """Compare an environment with what tests pin, print what changed by name, and return whether anything did."""
    versions = versions_of(python)
    print("\n".join(["== versions: installed -> compared", *(changed_versions(versions) or ["all are the same"])]))
    any_changed = False
    for made in (
        lambda: run_tests(python, "canaries of the seams", CANARIES),
        lambda: compare_losses(python, versions),
        lambda: run_tests(python, "rows of docs/parity.md", parity_rows(rows)),
        lambda: run_tests(python, "tests of docs/libraries.md", tests_of_the_page()),
    ):
        compared = made()
        _tell(compared)
        any_changed |= bool(compared.changed)
    return any_changed


def _parser() -> ToolParser:
    parser = ToolParser("Say what other versions of the libraries change, by name.")
    for name, line in pinned().items():
        default = "newest" if name in NEWEST else None
        text = f"version, or newest; default {default or line}"
        parser.add_argument(f"--{name}", dest=name, metavar="VERSION", default=default, help=text)
    parser.add_argument("--folder", type=Path, metavar="DIR", help="keep the environment there, and use it again")
    parser.add_argument("--rows", type=int, default=ROWS, metavar="N", help="how many rows of docs/parity.md to run")
    return parser


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    options = _parser().parse_args(argv)
    chosen = {name: value for name, value in vars(options).items() if name in pinned() and value is not None}
    with tempfile.TemporaryDirectory(prefix="next_versions_") as temporary:
        python = make_environment((options.folder or Path(temporary)).resolve(), requirements(chosen))
        return 1 if compare(python, options.rows) else 0


if __name__ == "__main__":
    run_tool(main)
