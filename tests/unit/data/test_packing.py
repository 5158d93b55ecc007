"""Documents in a sample: positions and what sees what, against megatron-core's own S x S mask."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids

from megatron_ext.config.derived.rank_order import context_chunks
from megatron_ext.config.schema import Config
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.loader import BatchLoader
from megatron_ext.data.microbatch import Batch, StageView, collate, divide, padding_sample
from megatron_ext.data.packing import documents_of, restarted_positions
from megatron_ext.model.gpt import GPT
from megatron_ext.plugins.prove.parity import SEQ_LENGTH, write_corpus
from megatron_ext.tokenizer.simple import ByteTokenizer
from tests.support.small_models import LLAMA, build_small_model, small_config

EOD, LENGTH = 9, 24
SAMPLES = torch.randint(0, 9, (4, LENGTH), generator=torch.Generator().manual_seed(0))
for sample, ends in enumerate(([], [0, 1, 7, 20], [LENGTH - 1], [3, 4, 5, 11, 12, LENGTH - 2, LENGTH - 1])):
    SAMPLES[sample, ends] = EOD


def masks_and_positions() -> tuple[torch.Tensor, torch.Tensor]:
    """megatron-core's: whether query sees key [sample, query, key], and positions [sample, S]."""
    found: Any = [_get_ltor_masks_and_position_ids(row, EOD, True, True, False, True) for row in SAMPLES]
    return torch.stack([~mask[0] for mask, _, _ in found]), torch.stack([positions for _, _, positions in found])


def test_positions_are_megatrons() -> None:
    assert torch.equal(restarted_positions(SAMPLES, EOD), masks_and_positions()[1])


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_runs_of_all_ranks_together_are_megatrons_mask(size: int) -> None:
    visible = torch.zeros(len(SAMPLES), LENGTH, len(SAMPLES) * LENGTH, dtype=torch.int)
    for rank in range(size):
        documents = documents_of(SAMPLES, EOD, rank, size)
        positions = torch.arange(LENGTH).view(2 * size, -1)[list(context_chunks(rank, size))].flatten()
        queries = [(sample, int(position)) for sample in range(len(SAMPLES)) for position in positions]
        covered = [row for segment in documents.segments for row in range(segment.rows.start, segment.rows.stop)]
        assert covered == list(range(len(queries))), "every query once, in order"
        for segment in documents.segments:
            for number, row in enumerate(range(segment.rows.start, segment.rows.stop)):
                seen = segment.keys - segment.queries + number + 1
                visible[queries[row]][segment.first_key : segment.first_key + seen] += 1
    expected = torch.zeros_like(visible)
    for sample, mask in enumerate(masks_and_positions()[0]):
        expected[sample, :, sample * LENGTH : (sample + 1) * LENGTH] = mask
    assert torch.equal(visible, expected)


@pytest.mark.parametrize("size", [1, 4])
def test_lengths_and_the_index_of_keys_say_the_same_as_the_runs(size: int) -> None:
    documents = documents_of(SAMPLES, EOD, size - 1, size)
    assert documents.query_ends.tolist()[-1] == SAMPLES.numel() // size
    assert documents.query_ends.diff().tolist() == [segment.queries for segment in documents.segments]
    assert documents.key_ends.diff().tolist() == [segment.keys for segment in documents.segments]
    assert documents.query_ends.dtype == documents.key_ends.dtype == torch.int32
    assert documents.longest == (documents.query_ends.diff().max(), documents.key_ends.diff().max())
    keys = [key for segment in documents.segments for key in range(segment.first_key, segment.first_key + segment.keys)]
    assert keys == (list(range(SAMPLES.numel())) if documents.key_index is None else documents.key_index.tolist())


def test_equal_lengths_stay_one_object_wherever_they_are_moved() -> None:
    """By which torch's cuDNN kernel knows them as equal."""
    for size, same in ((1, True), (4, False)):
        documents = documents_of(SAMPLES, EOD, size - 1, size)
        moved = documents.map(torch.clone)
        assert [one.key_ends is one.query_ends for one in (documents, moved)] == [same, same]
        assert torch.equal(moved.key_ends, documents.key_ends)


def batch(view: StageView) -> Batch:
    rows = [{**padding_sample(LENGTH), "tokens": row, "labels": row.roll(-1)} for row in SAMPLES]
    return divide(collate(rows, view), view)


def test_every_stage_knows_the_documents_and_restarted_positions() -> None:
    for first, last in ((True, False), (False, False), (False, True)):
        view = StageView(first, last, eod=EOD, restarts_positions=True, separates_documents=True)
        got = batch(view)
        assert got.documents is not None
        assert got.documents.segments == documents_of(SAMPLES, EOD).segments
        assert torch.equal(torch.as_tensor(got.position_ids), restarted_positions(SAMPLES, EOD))
        assert (got.tokens is None, got.labels is None) == (not first, not last)


def test_exchanged_heads_see_whole_documents() -> None:
    """And whoever computes at the positions of its rank the documents there, of the same batch."""
    view = StageView(cp_rank=1, cp_size=2, eod=EOD, separates_documents=True, exchanges_heads=True)
    documents = batch(view).documents
    assert documents is not None
    assert documents.segments == documents_of(SAMPLES, EOD, 1, 2).segments
    assert documents.whole is not None
    assert documents.whole.segments == documents_of(SAMPLES, EOD).segments
    moved = documents.map(lambda tensor: tensor.to("meta"))
    assert moved.whole is not None
    tensors = moved.begins_BS, moved.key_ends, moved.whole.begins_BS, moved.whole.key_ends
    assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_documents_begin_at_the_positions_that_a_rank_holds(size: int) -> None:
    """A part of a sample that goes on with a document of another rank's part begins none."""
    begins = masks_and_positions()[1] == 0
    for rank in range(size):
        positions = torch.arange(LENGTH).view(2 * size, -1)[list(context_chunks(rank, size))].flatten()
        assert torch.equal(documents_of(SAMPLES, EOD, rank, size).begins_BS, begins[:, positions])


def test_ends_of_keys_are_the_same_object_where_they_are_those_of_queries() -> None:
    """By which torch's cuDNN kernel knows it; parts of documents on context-parallel ranks have ends of their own."""
    whole = documents_of(SAMPLES, EOD)
    assert whole.key_ends is whole.query_ends
    part = documents_of(SAMPLES, EOD, 1, 2)
    assert part.key_ends is not part.query_ends
    assert not torch.equal(part.key_ends, part.query_ends)


@pytest.mark.parametrize("size", [2, 3])
def test_every_field_is_divided_alike(size: int) -> None:
    """The two chunks of a context-parallel rank, of each field that is there; the documents are those of the batch."""
    numbers = torch.arange(len(SAMPLES) * LENGTH).view(len(SAMPLES), LENGTH)
    documents = documents_of(SAMPLES, EOD, 1, size)
    fields = {"tokens": 0, "position_ids": 1000, "labels": 2000, "loss_mask": 3000}
    shifted: dict[str, Any] = {name: numbers + shift for name, shift in fields.items()}
    whole = Batch(**shifted, documents=documents)
    length = LENGTH // (2 * size)
    places = [*range(length, 2 * length), *range(LENGTH - 2 * length, LENGTH - length)]
    found = divide(whole, StageView(cp_rank=1, cp_size=size))
    for name, shift in fields.items():
        assert getattr(found, name).tolist() == [
            [row * LENGTH + place + shift for place in places] for row in range(len(SAMPLES))
        ]
    assert found.documents is documents
    assert divide(Batch(), StageView(cp_rank=1, cp_size=size)) == Batch()
    assert divide(whole, StageView()) is whole


SIZES = {"seq_length": SEQ_LENGTH, "max_position_embeddings": SEQ_LENGTH, "padded_vocab_size": 384}
MODELS = {"rotary": LLAMA, "learned positions": {}}
END = ByteTokenizer.eod


def packed_batch(config: Config, folder: Path) -> Batch:
    """32 samples of a real .bin/.idx pair, as training reads them."""
    write_corpus(folder)
    paths = {"train_data_path": (f"{folder}/train",), "data_cache_path": f"{folder}/cache", "eod_mask_loss": True}
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **paths))
    dataset = build_datasets(config, ByteTokenizer(), Splits(train=64, valid=0, test=0)).train
    assert dataset is not None
    view = StageView(eod=END, restarts_positions=True, separates_documents=True)
    loader = BatchLoader(
        dataset, vocab_size=257, seq_length=SEQ_LENGTH, micro_batch_size=32, dp_rank=0, dp_size=1, view=view
    )
    return loader.global_batch(0, 1)[0]


def alone(model: GPT, batch: Batch) -> torch.Tensor:
    """The loss of every token, each document in a forward pass of its own that knows of no documents."""
    assert batch.tokens is not None
    assert batch.labels is not None
    assert batch.documents is not None
    losses = []
    model.restarts_positions = False
    for segment in batch.documents.segments:
        tokens, labels = (ids.flatten()[segment.rows][None] for ids in (batch.tokens, batch.labels))
        losses.append(model(tokens, torch.arange(segment.queries)[None], labels=labels)[0])
    model.restarts_positions = True
    return torch.cat(losses).view(batch.tokens.shape)


@pytest.mark.parametrize("shape", MODELS)
def test_packed_documents_are_the_same_documents_run_alone(shape: str, tmp_path: Path) -> None:
    config = small_config({**SIZES, **MODELS[shape], "init_method_std": 0.1}, vocab_size=257)
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, reset_position_ids=True, reset_attention_mask=True)
    )
    (model,), _ = build_small_model(config)
    batch = packed_batch(config, tmp_path)
    assert batch.documents is not None
    assert batch.loss_mask is not None
    assert len(batch.documents.segments) > 40, "several documents in a sample"
    weights = list(model.parameters())

    packed = model(batch.tokens, batch.position_ids, labels=batch.labels, documents=batch.documents)
    expected = alone(model, batch)
    assert (packed - expected).abs().max() <= 1e-6 * expected.max()
    means = [float((losses.detach() * batch.loss_mask).sum() / batch.loss_mask.sum()) for losses in (packed, expected)]
    assert abs(means[0] - means[1]) <= 1e-6
    gradients, wanted = (
        torch.autograd.grad((losses * batch.loss_mask).sum(), weights, allow_unused=True)
        for losses in (packed, expected)
    )
    for got, exact in zip(gradients, wanted, strict=True):
        assert (got - exact).norm() <= 1e-5 * exact.norm()

    unaware = model(batch.tokens, batch.position_ids, labels=batch.labels)
    assert (unaware - expected).abs().max() > 1e-2, "the documents make a difference"
