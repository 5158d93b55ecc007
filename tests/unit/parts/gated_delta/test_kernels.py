"""fla-core's kernels in the place of our rule: run by Triton's interpreter, and compiled for an H100."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
INSTALLED = {each.name for each in distributions()}
needs_fla = pytest.mark.skipif(not {"fla-core", "triton"} <= INSTALLED, reason="needs fla-core and Triton")


def run_there(name: str, *flags: str, **variables: str) -> None:
    """Run a file of tests/support in a process of its own."""
    words = ["-m", "pytest", "--noconftest", "-p", "no:cacheprovider", *flags, f"tests/support/{name}.py"]
    ended = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert " passed" in ended.stdout


@needs_fla
def test_kernels_are_our_rule_in_tritons_interpreter() -> None:
    run_there("interpreted_recurrences", TRITON_INTERPRET="1")


# Slow: a whole chunk of Kimi Delta Attention; the test above has shorter sequences of it.
@pytest.mark.slow
@needs_fla
def test_long_sequences_are_our_rule_in_tritons_interpreter() -> None:
    run_there("interpreted_recurrences", "-m", "slow", TRITON_INTERPRET="1")


@needs_fla
def test_kernels_are_compiled_for_hopper(tmp_path: Path) -> None:
    run_there("compiled_recurrences", TRITON_CACHE_DIR=str(tmp_path))


# Slow: all that the test above compiles a part of.
@pytest.mark.slow
@needs_fla
def test_every_kernel_is_compiled_for_hopper(tmp_path: Path) -> None:
    run_there("compiled_recurrences", "-m", "slow", TRITON_CACHE_DIR=str(tmp_path))
