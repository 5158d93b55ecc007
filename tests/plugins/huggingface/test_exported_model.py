"""What counts as agreement of an exported model with the trained one, without transformers."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_ext.config.schema import DataConfig
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.huggingface import exported_model, transformers_reference
from megatron_ext.plugins.huggingface.exported_model import Agreement, LossAgreement, _alone, _corpus_samples, _tokens
from tests.support.corpora import corpus_of
from tests.support.small_models import small_config


@pytest.mark.parametrize(
    ("difference", "logit", "holds"),
    [
        (1e-5, 0.5, True),
        (1.01e-5, 0.5, False),
        (9.9e-5, 10.0, True),
        (1.01e-4, 10.0, False),
        (float("nan"), 1.0, False),
    ],
)
def test_logits_agree_within_rounding(difference: float, logit: float, holds: bool) -> None:
    """1e-5, or 1e-5 of the largest logit where that is above 1."""
    assert Agreement(difference, logit, 1).holds is holds


def test_losses_agree_within_a_millionth_of_ours() -> None:
    for ours, theirs, holds in ((2.0, 2.0 + 1.9e-6, True), (2.0, 2.0 - 2.1e-6, False), (4.0, 4.0 + 3.9e-6, True)):
        found = LossAgreement(ours, theirs, 1)
        assert found.relative_difference == abs(ours - theirs) / ours
        assert found.holds is holds
    assert not LossAgreement(float("nan"), 2.0, 1).holds


def samples(length: int, *starts: int) -> list[list[int]]:
    return [list(range(start, start + length + 1)) for start in starts]


def test_samples_overlap_by_a_token_and_end_with_the_corpus_of(tmp_path: Path) -> None:
    prefix = corpus_of(tmp_path, 5, 3, 1, 20)
    assert _corpus_samples(prefix, 4, 2).tolist() == samples(4, 0, 4), (
        "exactly 8 tokens end a document: one more is read"
    )
    assert _corpus_samples(prefix, 4, 3).tolist() == samples(4, 0, 4, 8)
    assert _corpus_samples(prefix, 4, 99).tolist() == samples(4, *range(0, 28, 4)), "29 tokens are 7 samples of 4 and 1"
    assert _corpus_samples(prefix, 28, 1).tolist() == samples(28, 0)
    with pytest.raises(ConfigurationError, match="text has 29 tokens; one sample needs 30"):
        _corpus_samples(prefix, 29, 1)


def test_one_sample_needs_a_token_more_than_it_is_long(tmp_path: Path) -> None:
    assert _corpus_samples(corpus_of(tmp_path, 5), 4, 3).tolist() == samples(4, 0)
    with pytest.raises(ConfigurationError, match="has 5 tokens; one sample needs 6"):
        _corpus_samples(str(tmp_path / "text"), 5, 3)


def test_tokens_are_from_all_over_the_vocabulary_and_within_the_positions() -> None:
    config = small_config({"max_position_embeddings": 16})
    assert _tokens(config).tolist() == [[7919 * place % 250 for place in range(16)]]
    assert _tokens(small_config({"max_position_embeddings": 500})).shape == (1, 128)
    assert _tokens(small_config({"max_position_embeddings": 16, "position_embedding_type": "rope"})).shape == (1, 128)


def test_tokens_are_a_text_where_the_tokenizer_is_at_hand() -> None:
    text = (exported_model._TEXT * 2).encode()[:16]
    config = replace(small_config(), data=DataConfig(vocab_size=257, tokenizer_type="ByteTokenizer"))
    assert _tokens(config).tolist() == [list(text)]
    gone = DataConfig(vocab_size=250, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="nowhere/at/all")
    assert _tokens(replace(config, data=gone)).tolist() == _tokens(small_config()).tolist()


def test_the_model_alone_is_in_fp32_on_one_process() -> None:
    config = small_config({"num_layers": 3}, {"tensor_model_parallel_size": 2, "world_size": 8}, {"bf16": True})
    alone = _alone(replace(config, training=replace(config.training, fp16=True)), 77)
    assert (alone.training.bf16, alone.training.fp16) == (False, False)
    assert alone.model == replace(config.model, seq_length=77), "rotary frequencies may depend on it"
    assert (alone.layout.world_size, alone.layout.tensor_model_parallel_size, alone.layout.device) == (1, 1, "cpu")


def test_without_transformers_one_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for compare in (exported_model.compare_logits, exported_model.compare_losses):
        with pytest.raises(ConfigurationError, match="pip install transformers, or give --no-verify"):
            compare(None, Path(), *[None] * (compare.__code__.co_argcount - 2))  # pyright: ignore


def test_the_mean_loss_is_over_all_tokens_but_the_first_ones() -> None:
    """In batches of 8: the last one, which is smaller, counts by its tokens."""
    tokens = torch.randint(0, 7, (11, 5), generator=torch.Generator().manual_seed(1))
    weight = torch.randn(7, 7, generator=torch.Generator().manual_seed(2))
    asked = []

    def model(rows: torch.Tensor) -> torch.Tensor:
        asked.append(tuple(rows.shape))
        return weight[rows]

    expected = torch.log_softmax(weight.double(), -1)[tokens[:, :-1], tokens[:, 1:]].mean()
    assert transformers_reference.mean_loss(model, tokens) == pytest.approx(-expected.item(), rel=1e-6)
    assert asked == [(8, 4), (3, 4)]


def test_the_earliest_of_equals_is_taken_by_the_reference() -> None:
    """Whatever follows them, in every form in which topk is called; elsewhere nothing changes."""
    scores = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0, 2.0, 0.0, 0.0]])
    with transformers_reference.EarliestOfEquals():
        for found in (scores.topk(4, dim=-1), torch.topk(scores, k=4, dim=-1, sorted=False), scores.topk(4)):
            assert found.indices.tolist() == [[1, 5, 3, 0]]
            assert found[0].tolist() == [[2.0, 2.0, 1.0, 0.0]]
        assert scores.repeat(1, 40).topk(130, dim=-1).indices[0, 120:].tolist() == [0, 2, 4, 6, 7, 8, 10, 12, 14, 15]
        assert scores.topk(2, largest=False).indices.tolist() == [[0, 2]]
        assert scores.sum() == 5.0
