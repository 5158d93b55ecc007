"""Writes to TensorBoard, with Megatron-LM's tags.

A resume removes the points past the checkpoint from the event files. TensorBoard's own `purge_step` cannot do that
here: it hides every tag's points from one number on, but some of ours are shown against iterations and some against
samples.
"""

import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_ext.durable import keep, only_files
from megatron_ext.errors import StorageError
from megatron_ext.telemetry.metrics import (
    Metrics,
    Sample,
    SampleMetrics,
    StepMetrics,
    scalars,
    scalars_against_samples,
)

_HEAD = struct.Struct("<Q4x")
_CHECKSUM = 4  # bytes


class TensorBoardWriter:
    """Writes one event per axis and step, and flushes it."""

    def __init__(self, folder: str | Path, loaded_iteration: int, loaded_samples: int):
        """Open the folder to go on after a checkpoint: later points in it are removed.

        A fresh start (0 and 0) only hides the points of an earlier run in the folder: nothing is deleted.

        Raises:
            StorageError: the folder cannot be written.
        """
        # torch.utils.tensorboard takes half a second to import: only for those who ask for it.
        from torch.utils.tensorboard.writer import SummaryWriter

        self._folder = folder
        with self._failures():
            if loaded_iteration:
                drop_after(Path(folder), loaded_iteration, loaded_samples)
            self._writer = SummaryWriter(str(folder), purge_step=None if loaded_iteration else 1)

    def write(self, metrics: Metrics) -> None:
        """Write the values of a step or an evaluation.

        Raises:
            StorageError: the folder cannot be written (disk full, a vanished mount).
        """
        with self._failures():
            if isinstance(metrics, SampleMetrics):
                for number, sample in enumerate(metrics.samples):
                    self._writer.add_text(f"sample {number}", _as_markdown(sample), metrics.iteration)
            else:
                self._add(scalars(metrics), metrics.iteration)
                self._add(scalars_against_samples(metrics), metrics.consumed_samples)
            for report in metrics.reports if isinstance(metrics, StepMetrics) else ():
                for title, pixels in report.pictures.items():
                    self._writer.add_image(title, pixels, metrics.iteration, dataformats="HWC")
            self._writer.flush()

    def write_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Show the run's arguments as text, one tag each, as Megatron does; raises as `write`."""
        with self._failures():
            for name, value in arguments.items():
                self._writer.add_text(name, str(value))
            self._writer.flush()

    def close(self) -> None:
        """Close the event file; raises as `write`."""
        with self._failures():
            self._writer.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Turn an error of the file system, which TensorBoard's own thread may have met, into a StorageError."""
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"cannot write to --tensorboard-dir {self._folder}: {error.strerror}. "
                "Free space or fix the permission there, or give another folder."
            ) from error

    def _add(self, values: Mapping[str, float], step: int) -> None:
        """Add all values in one event: add_scalar's event per value costs a millisecond per training step."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]  # protobuf makes it

        writer = self._writer.file_writer
        assert writer is not None, "SummaryWriter opens its file on construction"
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
        writer.add_summary(summary, step)


def _as_markdown(sample: Sample) -> str:
    """Return prompt and text as a block of code, which TensorBoard shows as it is."""
    lines = f"{sample.prompt} | {sample.text}".splitlines()
    return "\n".join(f"    {line}" for line in lines)


def drop_after(folder: Path, iteration: int, samples: int) -> None:
    """Remove points past `iteration`, or past `samples` for the tags against samples, from every event file.

    A record that was torn by a kill, or that is no event, is removed with everything after it: TensorBoard does not
    read past it. A file that has nothing to remove stays as it is. Checksums are neither compared nor made: in Python
    that takes a minute for the points of 300,000 steps, at every restart of a long run.
    """
    for path in sorted(folder.glob("events.out.tfevents.*")):
        keep(path, _kept(path, iteration, samples))


def _kept(path: Path, iteration: int, samples: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of bytes that stay."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]  # protobuf makes it

    for begin, end, content in _records(path):
        try:
            event = Event.FromString(content)
        except DecodeError:
            break
        values = event.summary.value
        limit = samples if values and values[0].tag.endswith(" vs samples") else iteration
        if event.step <= limit:
            yield begin, end


def _records(path: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield begin, end and content of each whole record: its length and that's checksum, content, checksum."""
    begin, size = 0, path.stat().st_size
    with open(path, "rb", opener=only_files) as file:
        while begin + _HEAD.size <= size:
            (length,) = _HEAD.unpack(file.read(_HEAD.size))
            end = begin + _HEAD.size + length + _CHECKSUM
            if end > size:
                return
            yield begin, end, file.read(length)
            file.seek(_CHECKSUM, os.SEEK_CUR)
            begin = end
