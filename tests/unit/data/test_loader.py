import threading
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import pytest
import torch

from megatron_ext.data.loader import BatchLoader
from megatron_ext.data.microbatch import Batch, StageView
from megatron_ext.data.skipped import NOTHING, skipped_samples
from megatron_ext.data.synthetic import MockDataset
from megatron_ext.errors import ConfigurationError, DataError, StorageError
from megatron_ext.train.run import HeldOut, Loaders
from tests.support.counted_samples import SEQ, Counting, assert_ended


def make(dataset: Any = None, **options: Any) -> BatchLoader:
    settings: dict[str, Any] = {
        "vocab_size": 5000,
        "seq_length": SEQ,
        "micro_batch_size": 2,
        "dp_rank": 1,
        "dp_size": 2,
    }
    return BatchLoader(dataset or Counting(), **(settings | options))


def firsts(batches: list[Batch]) -> list[list[int]]:
    """The first token of each sample of each microbatch, which is the sample's number."""
    return [batch.tokens[:, 0].tolist() for batch in batches if batch.tokens is not None]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_content_does_not_depend_on_the_threads(num_workers: int):
    loader = make(num_workers=num_workers)
    assert firsts(loader.global_batch(0, 2)) == [[2, 3], [6, 7]]
    assert firsts(loader.global_batch(8, 2)) == [[10, 11], [14, 15]]
    assert firsts(loader.global_batch(16, 3)) == [[18, 19], [22, 23], [26, 27]]  # a batch-size ramp-up
    assert firsts(loader.global_batch(500, 1)) == [[502, 503]]  # a resume
    assert firsts(loader.global_batch(504, 1)) == [[506, 507]]
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_another_ranks_microbatches_leave_what_is_loaded_ahead(num_workers: int):
    """A spike's batch is read again in another place, rank 0's too."""
    loader = make(num_workers=num_workers)
    assert firsts(loader.global_batch(0, 2)) == [[2, 3], [6, 7]]
    assert firsts(loader.microbatches_of(0, 0, 2)) == [[0, 1], [4, 5]]
    assert firsts(loader.microbatches_of(1, 0, 2)) == [[2, 3], [6, 7]]
    assert firsts(loader.global_batch(8, 2)) == [[10, 11], [14, 15]]
    loader.close()


def test_a_skipped_sample_is_padding_and_is_not_read():
    dataset = Counting()
    [batch] = make(dataset, skipped=skipped_samples(["3", "6-9"])).global_batch(0, 1)
    assert dataset.reads == [2]
    assert batch.tokens is not None
    assert batch.loss_mask is not None
    assert batch.tokens.tolist() == [[2, 3, 4, 5], [0, 0, 0, 0]]
    assert batch.loss_mask.sum(1).tolist() == [SEQ, 0]


def test_dtypes_and_shapes():
    batch = make(MockDataset(vocab_size=9, seq_length=SEQ, num_samples=9, seed=0, split=0)).global_batch(0, 1)[0]
    for field in fields(batch):
        values = getattr(batch, field.name)
        if field.name in ("documents", "ahead"):  # test_packing.py, test_microbatch.py
            assert values is None
            continue
        assert values.shape == (2, SEQ)
        assert values.dtype == (torch.float32 if field.name == "loss_mask" else torch.int64)
        assert values.is_contiguous()


def test_the_following_batch_is_read_ahead_and_only_once():
    dataset = Counting(length=12)
    loader = make(dataset, num_workers=1)
    loader.global_batch(0, 1)
    deadline = time.monotonic() + 60
    while len(dataset.reads) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    assert dataset.reads == [2, 3, 6, 7]
    loader.global_batch(4, 1)
    loader.global_batch(8, 1)  # the last one: nothing follows
    loader.close()
    assert dataset.reads == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_last_batch_of_an_evaluation_is_filled_with_what_does_not_count(num_workers: int):
    loader = make(num_workers=num_workers, dp_rank=0)
    for _ in range(2):
        batches = loader.global_batch(0, 2, end=5)
        assert firsts(batches) == [[0, 1], [4, 0]]
        masks = [batch.loss_mask.sum(dim=1).tolist() for batch in batches if batch.loss_mask is not None]
        assert masks == [[SEQ, SEQ], [SEQ, 0.0]]
    loader.close()


def test_a_stage_gets_what_it_reads():
    held = {
        (first, last): {
            field.name
            for field in fields(Batch)
            if getattr(make(view=StageView(is_first_stage=first, is_last_stage=last)).global_batch(0, 1)[0], field.name)
            is not None
        }
        for first in (True, False)
        for last in (True, False)
    }
    assert held == {
        (True, True): {"tokens", "position_ids", "labels", "loss_mask"},
        (True, False): {"tokens", "position_ids"},
        (False, True): {"labels", "loss_mask"},
        (False, False): set(),
    }


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_middle_stage_reads_nothing(reads_ahead: bool):
    dataset, middle = Counting(), StageView(is_first_stage=False, is_last_stage=False)
    before = set(threading.enumerate())
    assert make(dataset, view=middle, reads_ahead=reads_ahead).global_batch(0, 3) == [Batch()] * 3
    assert (dataset.reads, set(threading.enumerate()) - before) == ([], set()), "and has no threads for it"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("stage", "wrong"), [(StageView(is_first_stage=False), 15), (StageView(is_last_stage=False), 14), (StageView(), 15)]
)
def test_an_id_outside_the_vocabulary_is_named(num_workers: int, stage: StageView, wrong: int):
    loader = make(vocab_size=wrong, num_workers=num_workers, describe=lambda i: f"sample {i} of corpus.bin", view=stage)
    loader.global_batch(0, 1)
    loader.global_batch(4, 1)
    with pytest.raises(DataError) as caught:
        loader.global_batch(8, 1)
    assert str(caught.value).startswith(f"sample 11 of corpus.bin: token id {wrong} at position 3 is outside the")
    loader.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_named_where_it_is_needed(num_workers: int):
    class Broken(Counting):
        def __getitem__(self, index: int) -> Mapping[str, Any]:
            if index == 6:
                raise OSError("the disk is gone")
            return super().__getitem__(index)

    loader = make(Broken(), num_workers=num_workers)
    assert firsts(loader.global_batch(0, 1)) == [[2, 3]]  # though the batch read ahead has failed by now
    with pytest.raises(DataError, match="sample 6 cannot be read: OSError: the disk is gone"):
        loader.global_batch(4, 1)
    with pytest.raises(DataError, match="sample 1000 was asked of a dataset of 1000 samples"):
        loader.global_batch(998, 1)
    loader.close()


def test_a_run_ends_the_threads_of_all_its_loaders():
    others = set(threading.enumerate())
    train, held_out = make(num_workers=2), make(num_workers=3)
    for loader in (train, held_out):
        loader.global_batch(0, 2)
    assert len(set(threading.enumerate()) - others) == 5
    Loaders(train, Counting(), None, HeldOut(held_out, ()), NOTHING).close()  # pyright: ignore[reportArgumentType]
    assert set(threading.enumerate()) <= others


def test_threads_end():
    others = set(threading.enumerate())  # of other tests, some of which may end meanwhile
    closed, dropped = make(num_workers=3), make(num_workers=3)
    closed.global_batch(0, 2)
    dropped.global_batch(0, 2)
    assert len(set(threading.enumerate()) - others) == 6
    closed.close()
    assert len(set(threading.enumerate()) - others) == 3
    del dropped
    deadline = time.monotonic() + 60
    while (left := set(threading.enumerate()) - others) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not left


@pytest.mark.parametrize(
    ("length", "end", "following"),
    [
        (12, None, True),
        (4, None, False),  # the first batch was the last
        (5, None, True),
        (1000, 4, False),
        (1000, 5, True),
        (4, 8, True),
    ],
)
def test_following_samples_are_read_ahead_up_to_the_end(length: int, end: int | None, following: bool) -> None:
    """Of the samples, or of an evaluation, whose last batch is filled up."""
    loader = make(Counting(length=length), num_workers=1, dp_rank=0)
    loader.global_batch(0, 1, end)
    assert loader._expected == ((4, 1, end) if following else None)
    assert len(loader._pending) == following
    loader.close()


def test_a_skipped_sample_is_not_read_ahead() -> None:
    """Nor one behind the end of an evaluation."""
    dataset = Counting()
    loader = make(dataset, reads_ahead=True, skipped=skipped_samples(["3", "6", "15-18"]))
    wanted: list[list[int]] = []
    ahead: Any = loader._ahead
    ahead.will_need = lambda indices: wanted.append(list(indices))
    loader.global_batch(0, 1, end=19)
    assert wanted == [[2, 7, 10, 11, 14]]
    loader.close()


class Failing(Counting):
    """Every sample is an error."""

    def __init__(self, error: BaseException):
        super().__init__()
        self._error = error

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        raise self._error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (MemoryError(), MemoryError),
        (StorageError("the store is away"), StorageError),
        (ConfigurationError("none"), ConfigurationError),
        (ValueError("odd"), DataError),
        (OSError(5, "Input/output error"), DataError),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_other_errors_than_of_the_data_are_raised_as_they_are(
    error: Exception, raised: type[Exception], num_workers: int
) -> None:
    loader = make(Failing(error), num_workers=num_workers)
    with pytest.raises(raised) as caught:
        loader.global_batch(0, 1)
    assert (caught.value is error) == (raised is not DataError)
    loader.close()


@pytest.mark.parametrize("field", ["tokens", "labels"])
@pytest.mark.parametrize(("token", "wrong"), [(-1, True), (0, False), (4999, False), (5000, True)])
def test_ids_below_the_vocabulary_and_not_negative(field: str, token: int, wrong: bool) -> None:
    """Of both fields of the second of two samples, at its third place."""

    class Odd(Counting):
        def __getitem__(self, index: int) -> Mapping[str, Any]:
            sample = dict(super().__getitem__(index))
            sample[field] = sample[field].clone()
            sample[field][2] = token if index == 3 else 1
            return sample

    if not wrong:
        make(Odd()).global_batch(0, 1)
        return
    with pytest.raises(
        DataError, match=rf"^sample 3: token id {token} at position 2 is outside the vocabulary of 5000"
    ):
        make(Odd()).global_batch(0, 1)


@pytest.mark.parametrize("pins", [False, True])
def test_batches_are_pinned_where_it_is_asked_for(pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Size] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.shape) or tensor)
    make(pin_memory=pins).global_batch(0, 1)
    assert pinned == [torch.Size([2, SEQ])] * 4 * pins


@pytest.mark.parametrize("reads_ahead", [False, True])
def test_a_loader_ends_what_it_reads_ahead_with(reads_ahead: bool) -> None:
    others = set(threading.enumerate())
    loader = make(reads_ahead=reads_ahead)
    loader.global_batch(0, 1)
    begun = set(threading.enumerate()) - others
    assert len(begun) == 32 * reads_ahead
    loader.close()
    assert_ended(begun)
