"""The kernels that fla-core has for the rules of this plugin: their numbers by Triton's interpreter, and that they are
taken by its compiler. In no file of the rules, whose numbers the second tier computes once more without AVX-512."""

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
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


@pytest.mark.full
@needs_fla
def test_kernels_are_our_rule_in_tritons_interpreter() -> None:
    run_there("interpreted_recurrences", TRITON_INTERPRET="1")


# Slow: a whole chunk of Kimi Delta Attention; the test above has shorter sequences of it.
@pytest.mark.slow
@needs_fla
def test_long_sequences_are_our_rule_in_tritons_interpreter() -> None:
    run_there("interpreted_recurrences", "-m", "slow", TRITON_INTERPRET="1")


@pytest.mark.full
@needs_fla
def test_kernels_are_compiled_for_hopper(tmp_path: Path) -> None:
    run_there("compiled_recurrences", TRITON_CACHE_DIR=str(tmp_path))


# Slow: all that the test above compiles a part of.
@pytest.mark.slow
@needs_fla
def test_every_kernel_is_compiled_for_hopper(tmp_path: Path) -> None:
    run_there("compiled_recurrences", "-m", "slow", TRITON_CACHE_DIR=str(tmp_path))
