"""The driver file of a machine with an NVIDIA GPU, for machines without one; torch sees no GPU in the processes that
are started here."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TEXT = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Mar  5 22:23:56 UTC 2024\nGCC version: 12.3.0\n"
_PROGRAM = """
import pathlib, sys
from megatron_ext.device import hardware_queues
hardware_queues._DRIVER_FILES = (pathlib.Path(sys.argv[1]),)
{imports}
{start}
"""


def write_driver(folder: Path, version: str) -> Path:
    """Write what /proc/driver/nvidia/version says with a driver of this version, and return its path."""
    path = folder / "version"
    path.write_text(_TEXT.format(version))
    return path


def run_with_driver(driver: Path, imports: str, start: str, argv: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own that finds this driver file.

    Args:
        driver: path from `write_driver`.
        imports: statements after which `start` is run.
        start: a statement that takes its flags from `sys.argv[2:]`.
        argv: these flags.
    """
    program = _PROGRAM.format(imports=imports, start=start)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(driver), *argv]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
