"""What a command takes is that of everything that it has started."""

import sys

from benchmarks import process_tree

HOLDS = "held = bytearray([1]) * 60_000_000; import time; time.sleep(1.5)"


def test_memory_is_that_of_all_generations() -> None:
    """torchrun's ranks are children of its agent: here, of a shell that a shell has started."""
    python = f'{sys.executable} -c "{HOLDS}"'
    measured = process_tree.measure(["sh", "-c", f"sh -c '{python} & {python} & wait'; echo done"])
    assert (measured.exit_code, measured.output.split()) == (0, ["done"])
    assert 120_000_000 < measured.peak_bytes < 400_000_000


def test_what_ends_between_two_looks_has_the_peak_that_the_kernel_keeps() -> None:
    measured = process_tree.measure(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert (measured.exit_code, sorted(measured.output.split())) == (3, ["err", "out"])
    assert measured.peak_bytes > 100_000, "of a shell, in bytes"
