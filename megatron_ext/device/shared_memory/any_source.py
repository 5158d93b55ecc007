"""A message from whichever rank of the group sends one first."""

import time
from collections.abc import Collection
from datetime import timedelta

import torch

from megatron_ext.device.shared_memory import peers
from megatron_ext.device.shared_memory.mailbox import Incoming, ReceivedMessage
from megatron_ext.device.shared_memory.work import SharedWork

_BETWEEN_LOOKS = 0.0005  # seconds: a rank can sleep on one word alone, and each sender has its own


class MessageFromAnyone(SharedWork):
    """A message that this rank receives without saying from whom."""

    def __init__(self, boxes: Collection[Incoming], tensor: torch.Tensor):
        self._boxes = boxes
        self._channel = next(iter(boxes)).channel
        super().__init__(f"recv {self._channel.rank}<-anyone", [tensor])
        self._message: ReceivedMessage | None = None

    def _source_rank(self) -> int:
        return -1 if self._message is None else self._message.source_rank()

    def is_ready(self) -> bool:
        for box in self._boxes:
            self._message = self._message or box.receive_if_sent(self.tensors[0])
        return self._message is not None

    def await_ready(self, timeout: timedelta | None) -> None:
        began = time.monotonic()
        while not self.is_ready():
            time.sleep(_BETWEEN_LOOKS)
            if self._all_have_ended() and not self.is_ready():
                raise RuntimeError(f"Connection closed by peer: every other rank ended before {self.name}")
            limit = timeout or self._channel.timeout()
            if time.monotonic() - began > limit.total_seconds():
                raise RuntimeError(
                    f"Timed out waiting {limit // timedelta(milliseconds=1)}ms in {self.name} through shared memory: "
                    "no rank sent a message of this size"
                )

    def _all_have_ended(self) -> bool:
        processes = self._channel.members.processes
        return all(peers.has_ended(processes[box.source]) for box in self._boxes)

    def finish(self) -> None:
        if self._message is not None:
            self._message.finish()
            self.end()
