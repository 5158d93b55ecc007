"""What torch's callers get for an operation that is under way: something to wait for."""

import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from megatron_ext.device.shared_memory.record import Entry


class SharedWork(Work):
    """An operation through shared memory.

    Args:
        name: torch's, as its flight recorder has it.
        tensors: the result; for all-gathers of lists, a list of lists.
        given: what this rank gives, where that is something else.
    """

    def __init__(self, name: str, tensors: list[Any], given: Sequence[torch.Tensor] | None = None):
        super().__init__()
        self.name = name
        self.tensors = tensors
        self.given = tensors if given is None else given
        self.entry: Entry | None = None
        self.number = 0
        self.finished = False
        self._failure: BaseException | None = None

    def await_ready(self, timeout: timedelta | None) -> None:
        """Wait until `finish` can be called.

        Raises:
            RuntimeError: a rank was lost, or the time is over.
        """
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Return whether `finish` can be called."""
        raise NotImplementedError

    def finish(self) -> None:
        """Bring the result to its tensors, once."""
        raise NotImplementedError

    def end(self) -> None:
        """Mark it as finished, and let go of what is no longer needed."""
        self.finished = True
        if self.entry is not None:
            self.entry.has_ended = True

    def complete(self, timeout: timedelta | None = None) -> bool:
        """Wait, and bring the result to its tensors.

        Args:
            timeout: in place of the group's; None or zero for the group's.
        """
        if not self.finished:
            try:
                if torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
                    with torch.profiler.record_function(f"shared memory:{self.name}"):
                        self._complete(timeout)
                else:
                    self._complete(timeout)
            except RuntimeError as error:
                self._failure = error
                raise
        return True

    def _complete(self, timeout: timedelta | None) -> None:
        self.await_ready(timeout or None)
        self.finish()

    # What torch's own works have, by torch's names.

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not; bring the result to its tensors if it can be."""
        if not self.finished and self._failure is None and self.is_ready():
            self.finish()
        return self.finished or self._failure is not None

    def is_success(self) -> bool:
        """Return whether the result is in its tensors."""
        return self.finished

    def exception(self) -> BaseException | None:
        """Return why it failed; None if it did not."""
        return self._failure

    def result(self) -> list[torch.Tensor]:
        """Return the tensors that have the result, or will have it."""
        return self.tensors

    def synchronize(self) -> None:
        """Wait, as for an operation on a CPU nothing else is left to do."""
        self.complete()

    def source_rank(self) -> int:
        """Return the group's rank that sent a message."""
        return self._source_rank()

    def get_future(self) -> torch.futures.Future:
        """Return a future of the tensors, which a thread completes."""
        future: torch.futures.Future = torch.futures.Future()
        if self.finished:
            future.set_result(self.tensors)
        else:
            threading.Thread(target=self._complete_future, args=(future,), daemon=True).start()
        return future

    def _complete_future(self, future: torch.futures.Future) -> None:
        try:
            self.complete()
        except RuntimeError as error:
            future.set_exception(error)
        else:
            future.set_result(self.tensors)
