"""What a batch holds for a stage, and how it is divided among context-parallel ranks."""

import itertools
from typing import Any

import pytest
import torch

from megatron_ext.data.microbatch import Batch, StageView, collate, divide, padding_sample

EOD, LENGTH = 9, 24
SAMPLES = torch.randint(0, 9, (4, LENGTH), generator=torch.Generator().manual_seed(0))


def batch(view: StageView) -> Batch:
    rows = [{**padding_sample(LENGTH), "tokens": row, "labels": row.roll(-1)} for row in SAMPLES]
    return divide(collate(rows, view), view)


def test_documents_begin_where_the_samples_say_so() -> None:
    """And not after an end of document; a padding sample is one document."""
    begins = torch.zeros(LENGTH, dtype=torch.bool)
    begins[[0, 5, 6, 17]] = True
    rows: list[dict[str, torch.Tensor]] = [{**padding_sample(LENGTH), "tokens": SAMPLES[1], "document_begins": begins}]
    rows.append(padding_sample(LENGTH))
    got = collate(rows, StageView(eod=EOD, restarts_positions=True, separates_documents=True))
    expected = [*range(5), 0, *range(11), *range(7)]
    assert torch.as_tensor(got.position_ids).tolist() == [expected, list(range(LENGTH))]
    assert got.documents is not None
    assert got.documents.query_ends.diff().tolist() == [5, 1, 11, 7, LENGTH]


def test_a_stage_reads_tokens_for_either_flag() -> None:
    middle = {"is_first_stage": False, "is_last_stage": False}
    for flag in ("restarts_positions", "separates_documents"):
        view = StageView(**middle, eod=EOD, **{flag: True})
        assert (view.reads_samples, view.reads_tokens) == (True, True)
        got = batch(view)
        assert (got.position_ids is None, got.documents is None) == (
            flag != "restarts_positions",
            flag != "separates_documents",
        )


def test_without_the_flags_nothing_is_made() -> None:
    got = batch(StageView(eod=EOD))
    assert got.documents is None
    assert torch.equal(torch.as_tensor(got.position_ids), torch.arange(LENGTH).expand(len(SAMPLES), -1))


def test_a_batch_is_mapped_with_its_documents() -> None:
    view = StageView(cp_rank=1, cp_size=2, eod=EOD, separates_documents=True)
    moved = batch(view).to("meta").documents
    assert moved is not None
    assert moved.key_index is not None
    assert {moved.query_ends.device.type, moved.key_ends.device.type, moved.key_index.device.type} == {"meta"}


@pytest.mark.parametrize("is_pinned", [False, True])
def test_a_copy_to_a_device_waits_unless_it_is_from_pinned_memory(
    is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: is_pinned)
    monkeypatch.setattr(
        torch.Tensor, "to", lambda tensor, device, non_blocking: asked.append((device, non_blocking)) or tensor
    )
    Batch(tokens=torch.zeros(1, 2), labels=torch.zeros(1, 2)).to("cuda:1")
    assert asked == [("cuda:1", is_pinned)] * 2


def test_a_padding_sample_counts_in_nothing() -> None:
    padding = {name: values.tolist() for name, values in padding_sample(3).items()}
    assert padding == {"tokens": [0] * 3, "labels": [0] * 3, "loss_mask": [0.0] * 3, "position_ids": [0, 1, 2]}


def _ahead(view: StageView, **fields: Any) -> tuple[torch.Tensor, ...]:
    rows = [{**padding_sample(LENGTH), "tokens": row, "labels": row.roll(-1), **fields} for row in SAMPLES]
    got = divide(collate(rows, view), view)
    assert got.tokens is None, "the stage has tokens for its depths alone"
    assert got.ahead is not None
    return tuple(got.ahead)


@pytest.mark.parametrize("separates", [False, True])
def test_depths_read_what_lies_ahead_in_the_document(separates: bool) -> None:
    samples, mask = SAMPLES.tolist(), [float(index % 5 > 0) for index in range(LENGTH)]
    begins = torch.zeros(LENGTH, dtype=torch.bool)
    begins[[7, 8, 20]] = separates
    view = StageView(is_first_stage=False, depths=2, eod=EOD, separates_documents=separates)
    tokens, labels, weights = _ahead(view, loss_mask=torch.tensor(mask), document_begins=begins)
    for sample, position, depth in itertools.product(range(4), range(LENGTH), (1, 2)):
        place, end = (sample, position, depth - 1), position + depth
        if end >= LENGTH:
            assert weights[place] == 0
            continue
        assert tokens[place] == samples[sample][end]
        assert labels[place] == samples[sample][(end + 1) % LENGTH]
        crosses = bool(begins[position + 1 : end + 2].any())
        assert weights[place] == (0.0 if crosses else mask[end]), place


def test_depths_of_context_parallel_ranks_are_parts_of_the_whole_samples() -> None:
    whole = _ahead(StageView(is_first_stage=False, depths=3))
    for rank in range(3):
        chunks = [*range(4 * rank, 4 * rank + 4), *range(20 - 4 * rank, 24 - 4 * rank)]
        parts = _ahead(StageView(is_first_stage=False, depths=3, cp_rank=rank, cp_size=3))
        assert all(torch.equal(part, values[:, chunks]) for part, values in zip(parts, whole, strict=True))


def test_a_sample_that_ends_a_document_has_no_target_after_it() -> None:
    tokens = torch.tensor([1, 2, 3, EOD])
    row = {**padding_sample(4), "tokens": tokens, "labels": torch.tensor([2, 3, EOD, 5]), "loss_mask": torch.ones(4)}
    got = collate([row], StageView(depths=1, eod=EOD, restarts_positions=True)).ahead
    assert got is not None
    assert got.weights[0, :, 0].tolist() == [1.0, 1.0, 0.0, 0.0]
    plain = collate([row], StageView(depths=1, eod=EOD)).ahead
    assert plain is not None
    assert plain.weights[0, :, 0].tolist() == [1.0, 1.0, 1.0, 0.0]
