"""Packed documents against the same documents run alone: losses of every token, gradients, on real files."""

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron_ext.config.schema import Config
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.loader import BatchLoader
from megatron_ext.data.microbatch import Batch, StageView
from megatron_ext.model.gpt import GPT
from megatron_ext.tokenizer.simple import ByteTokenizer
from megatron_ext.verify.parity import SEQ_LENGTH, write_corpus
from tests.support.small_models import LLAMA, build_small_model, small_config

SIZES = {"seq_length": SEQ_LENGTH, "max_position_embeddings": SEQ_LENGTH, "padded_vocab_size": 384}
MODELS = {"rotary": LLAMA, "learned positions": {}}
EOD = ByteTokenizer.eod


def packed_batch(config: Config, folder: Path) -> Batch:
    """32 samples of a real .bin/.idx pair, as training reads them."""
    write_corpus(folder)
    paths = {"train_data_path": (f"{folder}/train",), "data_cache_path": f"{folder}/cache", "eod_mask_loss": True}
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, **paths))
    dataset = build_datasets(config, ByteTokenizer(), Splits(train=64, valid=0, test=0)).train
    assert dataset is not None
    view = StageView(eod=EOD, restarts_positions=True, separates_documents=True)
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
