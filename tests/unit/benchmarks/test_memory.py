"""Bytes of storages; tests/distributed/test_memory.py counts those of real runs."""

import torch

from benchmarks import memory


def test_a_storage_counts_once_however_many_tensors_look_into_it() -> None:
    whole, seen = torch.zeros(100), set()
    assert memory._count([whole[:10], None, whole[50:], torch.zeros(3, dtype=torch.bfloat16)], seen) == 400 + 6
    assert memory._count([whole], seen) == 0
    assert memory._count([torch.zeros(5)], seen) == 20
