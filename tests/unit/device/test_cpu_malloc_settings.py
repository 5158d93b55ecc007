"""A CPU process keeps the memory that it frees."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.device.cpu import keep_freed_memory

PROGRAM = """
import mmap, resource, sys
from megatron_ext.device.cpu import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
size, blocks, rounds = 4 << 20, 8, 3
def step():
    held = [bytearray(b"x") * size for _ in range(blocks)]
    while held:
        held.pop()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
first = faults()
for _ in range(rounds):
    step()
print((faults() - first) * mmap.PAGESIZE / (rounds * blocks * size))
"""
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="musl has no such settings")
@pytest.mark.parametrize(("how", "least", "most"), [("kept", 0.0, 0.3), ("returned", 0.7, 1.3)])
def test_large_blocks_are_given_out_again_without_a_fault_for_each_page(how: str, least: float, most: float) -> None:
    """The share of the pages that are allocated anew: all of them without the setting."""
    environment = {"PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", PROGRAM, how]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert least <= float(ran.stdout) <= most


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_what_the_environment_sets_stays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "131072")
    assert not keep_freed_memory()
