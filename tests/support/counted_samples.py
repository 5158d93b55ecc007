"""Samples that count how often each is read, and the end of the threads that read them."""

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

SEQ = 4


class Counting:
    """Sample i holds the tokens i, i + 1, ...; it remembers what was read."""

    def __init__(self, length: int = 1000):
        self._length = length
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        self.reads.append(index)
        text = torch.arange(index, index + SEQ + 1)
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "loss_mask": torch.ones(SEQ),
            "position_ids": torch.arange(SEQ),
        }


def assert_ended(threads: set[threading.Thread]) -> None:
    """They have a second to end in before who closes them goes on, which a busy machine may not give them."""
    deadline = time.monotonic() + 60
    while (left := {thread for thread in threads if thread.is_alive()}) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not left
