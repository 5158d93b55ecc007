"""Checks Python and the packages: the versions that the program needs, and strangers that bear a known name."""

import importlib.machinery
import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from megatron_ext.plugins.doctor.finding import Finding, Launch, error, ok, warning

_ROOT = Path(__file__).resolve().parents[3]


def python_is_new_enough(launch: Launch) -> Iterator[Finding]:
    """Check the version of Python."""
    wanted = _project()["requires-python"]
    have = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] >= tuple(map(int, wanted.removeprefix(">=").split("."))):
        yield ok(f"Python {have}")
    else:
        yield error(
            f"Python {have}, but {wanted} is needed",
            "megatron-core of the right version installs on no other",
            "python3.12 -m venv .venv; then .venv/bin/pip install -r requirements.txt",
        )


def packages_are_the_tested_ones(launch: Launch) -> Iterator[Finding]:
    """Check packages against the ranges of pyproject.toml, and the exact versions of requirements.txt."""
    if installed_version("packaging") is None:
        yield error(
            "the requirements are not installed", "not even `packaging` is there", "pip install -r requirements.txt"
        )
        return
    from packaging.requirements import Requirement

    tested = {
        requirement.name.lower(): requirement
        for line in _tested_versions().splitlines()
        if line.strip() and not line.startswith("#")
        for requirement in [Requirement(line)]
    }
    seen = []
    for text in _project()["dependencies"]:
        needed = Requirement(text)
        pinned = tested.get(needed.name.lower(), needed)
        install = f'pip install "{pinned}"'
        have = installed_version(needed.name)
        if have is None:
            yield error(f"{needed.name} is not installed", f"the program needs {needed}", install)
        elif not needed.specifier.contains(have, prereleases=True):
            yield error(f"{needed.name} {have}, but {needed} is needed", "it is outside of what can work", install)
        elif not pinned.specifier.contains(have, prereleases=True):
            yield warning(
                f"{needed.name} {have}, but the tests run with {pinned}",
                "another version may behave otherwise",
                install,
            )
        else:
            seen.append(f"{needed.name} {have}")
    if seen:
        yield ok(", ".join(seen))


def apex_is_nvidias(launch: Launch) -> Iterator[Finding]:
    """Check that `apex` is NVIDIA's: the one of PyPI is an unrelated package for web servers."""
    # On the path itself: a process that leaves apex out of its imports (device/external_kernels.py) does not find it.
    spec = importlib.machinery.PathFinder.find_spec("apex")
    if spec is None:
        return
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if any((folder / "optimizers").is_dir() for folder in folders):
        yield ok("apex is NVIDIA's")
        return
    yield error(
        f"apex {installed_version('apex') or ''} is not NVIDIA's".replace("  ", " "),
        "the package of that name on PyPI is unrelated, and megatron-core takes it for NVIDIA's",
        "pip uninstall apex; nothing here needs it (NVIDIA's is built from github.com/NVIDIA/apex)",
    )


def one_megatron(launch: Launch) -> Iterator[Finding]:
    """Check for a checkout of Megatron-LM on the path, which would be imported in place of the installed
    megatron-core."""
    spec = importlib.util.find_spec("megatron")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or () if spec else ())]
    cores = [folder for folder in folders if (folder / "core" / "__init__.py").is_file()]
    if len(cores) > 1:
        others = ", ".join(str(core.parent) for core in cores if "site-packages" not in core.parts)
        yield error(
            f"{len(cores)} packages megatron.core: {', '.join(map(str, cores))}",
            f"Python takes the first, {cores[0]}, whatever its version",
            f"take {others or cores[0].parent} out of PYTHONPATH",
        )


def installed_version(name: str) -> str | None:
    """Return the version of an installed distribution; None where there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _project() -> dict:
    """Return the project table of pyproject.toml; outside of a checkout, `requires-python` and `dependencies` from the
    metadata of the installed package."""
    file = _ROOT / "pyproject.toml"
    if file.is_file() and (_ROOT / "megatron_ext").is_dir():
        return tomllib.loads(file.read_text())["project"]
    needed = [text for text in metadata.requires("megatron-ext") or () if "extra ==" not in text]
    return {"requires-python": metadata.metadata("megatron-ext")["Requires-Python"], "dependencies": needed}


def _tested_versions() -> str:
    file = _ROOT / "requirements.txt"
    return file.read_text() if file.is_file() else ""
