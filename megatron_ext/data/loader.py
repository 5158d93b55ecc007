"""Batches are loaded ahead of the step that needs them.

A step names the samples it wants by position (`sampler`), so what a batch holds never depends on threads. While the
step computes, background threads load the batch that will follow if the sizes stay as they are; when they change
(batch-size ramp-up, evaluation, a resume) the guess is dropped and the batch is loaded on the spot.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from megatron_ext.data.microbatch import WHOLE, Batch, StageView, collate, divide, padding_sample
from megatron_ext.data.read_ahead import STEPS, ReadAhead
from megatron_ext.data.sampler import microbatch_sample_ids
from megatron_ext.data.samples import SampleDataset
from megatron_ext.data.skipped import NOTHING, SkippedSamples
from megatron_ext.data.threads import DaemonThreads
from megatron_ext.errors import DataError, TrainingError

ANOTHER_TOKENIZER = (
    "Was the data made with another tokenizer than --tokenizer-type and --tokenizer-model name? Run "
    "megatron-ext preprocess with this one"
)


class BatchLoader:
    """Loads the microbatches of one data-parallel rank.

    Args:
        dataset: the samples.
        vocab_size: every token id must be below it.
        seq_length: tokens in a sample.
        micro_batch_size: samples in one microbatch of this rank.
        dp_rank: this data-parallel rank.
        dp_size: number of data-parallel ranks.
        view: the fields that this rank reads of its samples. A stage between first and last mostly reads nothing, and
            gets empty batches.
        num_workers: background threads; 0 loads when asked.
        pin_memory: put the batches into page-locked memory, for copies to a GPU that overlap with computation.
        describe: where a sample comes from, for error texts.
        reads_ahead: read the samples of the next steps ahead, many at a time: for data of a store, which answers late.
        skipped: samples in whose place there is padding that no loss counts; they are not read.
        remedy: advice about a token id outside of the vocabulary, for the error.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        vocab_size: int,
        seq_length: int,
        micro_batch_size: int,
        dp_rank: int,
        dp_size: int,
        view: StageView = WHOLE,
        num_workers: int = 0,
        pin_memory: bool = False,
        describe: Callable[[int], str] = lambda index: f"sample {index}",
        reads_ahead: bool = False,
        skipped: SkippedSamples = NOTHING,
        remedy: str = ANOTHER_TOKENIZER,
    ):
        self.dataset = dataset
        self._ahead = ReadAhead(dataset) if reads_ahead and view.reads_samples else None
        self._vocab_size = vocab_size
        self._padding = padding_sample(seq_length)
        self._micro_batch_size = micro_batch_size
        self._dp_rank = dp_rank
        self._dp_size = dp_size
        self._view = view
        self._pin_memory = pin_memory
        self._describe = describe
        self._skipped, self._remedy = skipped, remedy
        self._threads = DaemonThreads(num_workers, "batch-loader") if num_workers > 0 else None
        self._expected: tuple[int, int, int | None] | None = None
        self._pending: list[Future[Batch]] = []

    def global_batch(self, consumed_samples: int, num_microbatches: int, end: int | None = None) -> list[Batch]:
        """Return this rank's microbatches of the step that begins after `consumed_samples` samples.

        Args:
            consumed_samples: samples that all ranks used before.
            num_microbatches: microbatches of this rank in the step.
            end: first sample past the end, for an evaluation; places from this sample on hold padding with loss mask
                zero.

        Returns:
            The microbatches in order, each of [micro_batch, seq].

        Raises:
            DataError: a sample cannot be read, or holds a token id outside the vocabulary.
        """
        wanted = (consumed_samples, num_microbatches, end)
        self._read_ahead(*wanted)
        if self._threads is None:
            return [self._load(consumed_samples, number, end) for number in range(num_microbatches)]
        current = self._pending if wanted == self._expected else self._submit(*wanted)
        following = consumed_samples + num_microbatches * self._micro_batch_size * self._dp_size
        self._expected, self._pending = None, []
        if following < (len(self.dataset) if end is None else end):
            self._expected = (following, num_microbatches, end)
            self._pending = self._submit(*self._expected)
        return [future.result() for future in current]

    def microbatches_of(self, dp_rank: int, consumed_samples: int, num_microbatches: int) -> list[Batch]:
        """Return the microbatches that `global_batch` returns on another data-parallel rank; batches loaded ahead
        stay."""
        return [self._load(consumed_samples, number, None, dp_rank) for number in range(num_microbatches)]

    def close(self) -> None:
        """End the background threads."""
        if self._threads is not None:
            self._threads.close()
        if self._ahead is not None:
            self._ahead.close()

    def _read_ahead(self, consumed_samples: int, num_microbatches: int, end: int | None) -> None:
        """Begin to read the samples of this step and of the next ones."""
        if self._ahead is None:
            return
        # Microbatches are counted through the steps: a step's microbatches follow on the ones of the step before.
        microbatches = range(num_microbatches * (STEPS + 1))
        ids = (index for number in microbatches for index in self._ids(consumed_samples, number, end))
        self._ahead.will_need([index for index in ids if index is not None and index not in self._skipped])

    def _ids(
        self, consumed_samples: int, microbatch: int, end: int | None, dp_rank: int | None = None
    ) -> list[int | None]:
        return microbatch_sample_ids(
            consumed_samples,
            microbatch,
            micro_batch_size=self._micro_batch_size,
            dp_rank=self._dp_rank if dp_rank is None else dp_rank,
            dp_size=self._dp_size,
            end=end,
        )

    def _submit(self, consumed_samples: int, num_microbatches: int, end: int | None) -> list[Future[Batch]]:
        assert self._threads is not None
        return [
            self._threads.submit(lambda number=number: self._load(consumed_samples, number, end))
            for number in range(num_microbatches)
        ]

    def _load(self, consumed_samples: int, microbatch: int, end: int | None, dp_rank: int | None = None) -> Batch:
        if not self._view.reads_samples:
            return Batch()
        ids = self._ids(consumed_samples, microbatch, end, dp_rank)
        samples = [self._padding if index is None or index in self._skipped else self._read(index) for index in ids]
        batch = collate(samples, self._view)
        for values in (batch.tokens, batch.labels):
            if values is not None:
                self._check_range(values, ids)
        batch = divide(batch, self._view)
        return batch.pin_memory() if self._pin_memory else batch

    def _check_range(self, values: torch.Tensor, ids: list[int | None]) -> None:
        wrong = (values < 0) | (values >= self._vocab_size)
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            index = ids[row]
            assert index is not None
            raise DataError(
                f"{self._describe(index)}: token id {int(values[row, column])} at position {column} is outside the "
                f"vocabulary of {self._vocab_size}. {self._remedy}"
            )

    def _read(self, index: int) -> Mapping[str, Any]:
        if index >= len(self.dataset):
            raise DataError(f"sample {index} was asked of a dataset of {len(self.dataset)} samples")
        try:
            return self.dataset[index] if self._ahead is None else self._ahead[index]
        except (TrainingError, MemoryError):
            raise
        except Exception as error:
            raise DataError(f"{self._describe(index)} cannot be read: {type(error).__name__}: {error}") from error
