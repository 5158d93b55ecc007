"""Every test process computes on the CPU, prepared as the program itself would be."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch  # after the number of threads is said

from megatron_ext import device

device.install("cpu")


@pytest.fixture(autouse=True)
def no_groups_are_left() -> Iterator[None]:
    """A test that starts process groups in this process must not leave them to the tests after it."""
    yield
    if torch.distributed.is_initialized():
        from megatron_ext.parallel import groups

        groups.destroy()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The file that takes longest begins first, lest one process runs it while the other has nothing left to do."""
    items.sort(key=lambda item: item.path.name != "test_examples.py")
