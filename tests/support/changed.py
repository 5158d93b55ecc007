"""Names the test files that a change may concern: `bash tests/run.sh --changed [COMMIT]` gives them to pytest.

    python -m tests.support.changed            # since HEAD, with what is not committed
    python -m tests.support.changed main       # since the branch left main

A file concerns its importers, and these are asked no further: whatever trains imports nearly everything, and would make
every change one of everything. A test file is chosen where it, or what it takes from tests/support, imports a changed
file or one of its importers, and where it lies in the folder of a changed one, as the layout of tests says. What is no
Python file concerns the tests that name it, or else its folder.
"""

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.support.syntax import nodes_of, source

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("megatron_ext", "tests", "tools", "tasks", "benchmarks")
CONCERNS_ALL = {"pyproject.toml", "requirements.txt", "requirements-dev.txt", "tests/conftest.py", "tests/run.sh"}


def changed_files(commit: str, root: Path = ROOT) -> set[str]:
    """Return the files that differ from where `commit` and HEAD part, and those that git does not know yet.

    Raises:
        subprocess.CalledProcessError: git knows no such commit.
    """

    def git(*arguments: str) -> list[str]:
        run = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True)
        return run.stdout.splitlines()

    [base] = git("merge-base", commit, "HEAD")
    return {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}


def concerned(changed: Iterable[str], root: Path = ROOT) -> set[str]:
    """Return the test files that a change of these files concerns, all paths from the root of the repository."""
    files = {file for file in changed if not file.startswith("tests/checks/")}
    tests = {path.relative_to(root).as_posix() for path in (root / "tests").rglob("test_*.py")}
    tests = {test for test in tests if not test.startswith("tests/checks/")}
    if files & CONCERNS_ALL:
        return tests
    folders = {folder for file in files for folder in _folders_of_tests(file)}
    graph = {path.relative_to(root).as_posix(): _imported(path, root) for path in _sources(root)}
    near = files | {file for file, imports in graph.items() if imports & files and not file.startswith("tests/")}
    named = {Path(file).name for file in files if not file.endswith(".py")}
    named |= {Path(file).parts[2] for file in files if file.startswith("megatron_ext/plugins/")} - {"__init__.py"}
    if any(file.startswith("megatron_ext/") for file in files):
        folders.add("tests/parity")
    return {
        test
        for test in tests
        if test in files
        or str(Path(test).parent) in folders
        or _with_helpers(test, graph) & near
        or any(name in source(root / test) for name in named)
    }


def _folders_of_tests(file: str) -> Iterator[str]:
    """Yield where the layout of tests puts those of a file."""
    folder = Path(file).parent
    if folder.parts[:2] == ("megatron_ext", "plugins"):
        yield f"tests/{'/'.join(folder.parts[1:])}"
    elif folder.parts[:1] == ("megatron_ext",):
        yield "/".join(("tests/unit", *folder.parts[1:]))
    elif folder.parts:
        yield f"tests/unit/{folder.as_posix()}"


def _with_helpers(test: str, graph: dict[str, set[str]]) -> set[str]:
    """Return what a test file imports, and what the helpers in tests/support that it uses import."""
    found: set[str] = set()
    waiting = [test]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += [file for file in new if file.startswith("tests/")]
    return found


def _sources(root: Path) -> list[Path]:
    return [path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))]


@functools.cache
def _imported(path: Path, root: Path) -> set[str]:
    """Return the files of the repository that a file imports, wherever it does."""
    names: set[str] = set()
    for node in nodes_of(source(path)):
        match node:
            case ast.ImportFrom(module=str(module)):
                names |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
            case ast.Import():
                names |= {alias.name for alias in node.names}
    files = {name.replace(".", "/") + ".py" for name in names if name.partition(".")[0] in SOURCES}
    return {file for file in files if (root / file).is_file()}


def main(argv: list[str]) -> int:
    """Print the test files that the changes since a commit concern; the exit code is 64 where git knows no such one."""
    commit = argv[0] if argv else "HEAD"
    try:
        changed = changed_files(commit)
    except subprocess.CalledProcessError as error:
        print(f"--changed {commit}: {error.stderr.strip()}; use a commit or branch of `git log --all`", file=sys.stderr)
        return 64
    print(*sorted(concerned(changed)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
