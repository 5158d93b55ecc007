"""Says in one line what to run where a Python that lacks the packages of this program has started it, or has a plugin
of it that cannot be used.

    error: /usr/bin/python3 has no psutil, which this program needs; run: source /home/me/checkout/.venv/bin/activate

Every program imports this package before it imports any other, so that the package itself has `explain` called.
"""

import sys
from pathlib import Path
from types import TracebackType

from megatron_ext.errors import ConfigurationError, PluginError
from megatron_ext.terminal import note

_DISTRIBUTIONS = {"megatron": "megatron-core", "yaml": "pyyaml"}
_NEEDED = {"numpy", "psutil", "sentencepiece", "tokenizers", "torch", *_DISTRIBUTIONS}
"""Modules without which programs do not work, of those that pyproject.toml names."""

_PACKAGE = Path(__file__).resolve().parent
_SET_UP = Path("tools/environment.sh")


def explain() -> None:
    """End the process with exit code 64 and a line that says what to run, where it would end with the traceback of one
    of our files that did not find a package of these, or of an error in a plugin. Other errors are shown as before."""
    sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if isinstance(error, PluginError):
        note(f"error: {error}")
        raise SystemExit(error.exit_code)
    lacking = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if lacking not in _NEEDED or not _is_ours(traceback):
        sys.__excepthook__(kind, error, traceback)
        return
    name = _DISTRIBUTIONS.get(lacking, lacking)
    note(f"error: {sys.executable} has no {name}, which this program needs; run: {_command(name)}")
    raise SystemExit(ConfigurationError.exit_code)


def _is_ours(traceback: TracebackType | None) -> bool:
    """Return whether a traceback ends in a file of this package, or of the checkout that holds it."""
    last = ""
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        last = last if name.startswith("<frozen") else name  # Python's own import system
        traceback = traceback.tb_next
    return not last.startswith("<") and Path(last).resolve().is_relative_to(_root() or _PACKAGE)


def _root() -> Path | None:
    """Return the folder of the checkout that holds this package; None where it is installed without one."""
    return _PACKAGE.parent if (_PACKAGE.parent / _SET_UP).exists() else None


def _command(name: str) -> str:
    """Return the command that makes the packages available to the next start."""
    root = _root()
    if root is None:
        return f"{sys.executable} -m pip install {name}"
    environment = root / ".venv"
    # tools/environment.sh leaves a file with this name once all is installed: before that, it goes on where it was.
    if any(environment.glob(".installed-*")) and Path(sys.prefix).resolve() != environment.resolve():
        return f"source {environment}/bin/activate"
    return f"cd {root} && bash {_SET_UP} requirements.txt && source .venv/bin/activate"
