"""Sums over what was sent; tests/distributed/test_traffic.py counts real collectives."""

import torch

from benchmarks import traffic


def test_nested_tensors_are_counted_by_their_types() -> None:
    tensor = torch.zeros(3, 2, dtype=torch.float64)
    assert traffic._bytes(tensor) == 48
    assert traffic._bytes([[tensor, tensor[:1]], (torch.zeros(3, dtype=torch.int8),)]) == 48 + 16 + 3


def test_bytes_are_summed_over_the_axes_asked_for() -> None:
    counter = traffic.Traffic()
    counter.sent = {
        ("all-gather", "dp"): traffic.Sent(1, 10.0),
        ("all-gather", "tp"): traffic.Sent(2, 5.0),
        ("send", "pp"): traffic.Sent(1, 3.0),
    }
    assert counter.bytes("all-gather") == 15.0
    assert counter.bytes("all-gather", "tp") == 5.0
    assert counter.bytes("all-gather", "tp", "dp", "pp") == 15.0
    assert counter.bytes("send", "tp") == 0.0
    assert counter.total == 18.0
