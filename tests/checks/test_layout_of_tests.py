"""Where the test of a module lies follows from the module's path, and nothing else."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UNIT, PLUGINS = ROOT / "tests" / "unit", ROOT / "tests" / "plugins"
OF_ALL_SOURCES = {"docs/test_guides.py"}
"""Tests that look at every page."""


def counterparts(folder: Path, root: Path = ROOT) -> set[str]:
    """Names of the modules and pages that tests in `tests/unit/<folder>` may be about.

    A folder of tests is named after a folder of megatron_ext, of the repository (tools, benchmarks, docs, examples) or
    of tests (support). What a script of tools/ starts is a module of cli/: its tests may be in cli/, too.
    """
    places = [root / "megatron_ext" / folder, *([root / "tools"] if folder == Path("cli") else [])]
    if folder.parts:
        places += [root / folder, root / "tests" / folder]
    else:
        places += [root]
    files = {
        file.stem.lower().replace(".", "_")
        for place in places
        for file in place.glob("*.*")
        if file.suffix in (".py", ".md", ".sh", ".toml")
    }
    packages = {package.parent.name for place in places if folder.parts for package in place.glob("*/__init__.py")}
    packages |= {example.name for example in (root / "examples").glob("*/") if folder == Path("examples")}
    return (files | packages | {folder.name}) - {"", "__init__"}


def has_counterpart(test: Path, root: Path = ROOT) -> bool:
    """Return whether `tests/unit/<test>` is test_<module>.py, or test_<module>_<subject>.py, of a module there."""
    name = test.stem.removeprefix("test_")
    return any(name == module or name.startswith(f"{module}_") for module in counterparts(test.parent, root))


def test_every_test_file_lies_where_its_module_does() -> None:
    found = {path.relative_to(UNIT).as_posix() for path in UNIT.rglob("test_*.py")} - OF_ALL_SOURCES
    found |= {path.relative_to(UNIT.parent).as_posix() for path in PLUGINS.rglob("test_*.py")}
    lost = sorted(name for name in found if not has_counterpart(Path(name)))
    assert lost == [], (
        "tests of megatron_ext/train/step.py are in tests/unit/train/test_step.py, or in test_step_<subject>.py there; "
        "tests of megatron_ext/plugins/ are in tests/plugins/ in the same way"
    )


@pytest.mark.parametrize(
    ("test", "is_known"),
    [
        ("train/test_step.py", True),
        ("train/test_step_losses.py", True),
        ("train/test_stepping.py", False),
        ("test_durable.py", True),
        ("test_step.py", False),
        ("test_train_step.py", False),  # a room is no module, at the top
        ("docs/test_faults.py", True),
        ("support/test_program.py", True),
        ("train/sub/test_part_of_it.py", True),
        ("train/test_sub.py", True),
        ("train/sub/test_sub.py", True),
    ],
)
def test_counterparts_are_found_by_path(test: str, is_known: bool, tmp_path: Path) -> None:
    for name in (
        "megatron_ext/train/step.py",
        "megatron_ext/train/sub/__init__.py",
        "megatron_ext/train/sub/part.py",
        "megatron_ext/durable.py",
        "docs/faults.md",
        "tests/support/program.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert has_counterpart(Path(test), tmp_path) == is_known
