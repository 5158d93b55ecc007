"""What counts as agreement of an exported model and of an exported tokenizer, without transformers."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config.schema import DataConfig
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.tokenizer.huggingface import HuggingFaceTokenizer
from megatron_ext.verify import by_transformers, exported_tokenizer, huggingface
from megatron_ext.verify.exported_tokenizer import _compare, _documents, _held_out_texts, _Reader, _short
from megatron_ext.verify.huggingface import Agreement, LossAgreement, _alone, _corpus_samples, _tokens
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


def corpus(folder: Path, *lengths: int) -> str:
    """Documents of 0, 1, 2 ... with these lengths."""
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    with IndexedWriter(folder / "text", np.uint16) as writer:
        at = 0
        for length in lengths:
            writer.add_tokens(tokens[at : at + length].tobytes(), [length])
            at += length
    return str(folder / "text")


def samples(length: int, *starts: int) -> list[list[int]]:
    return [list(range(start, start + length + 1)) for start in starts]


def test_samples_overlap_by_a_token_and_end_with_the_corpus(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, 5, 3, 1, 20)
    assert _corpus_samples(prefix, 4, 2).tolist() == samples(4, 0, 4), (
        "exactly 8 tokens end a document: one more is read"
    )
    assert _corpus_samples(prefix, 4, 3).tolist() == samples(4, 0, 4, 8)
    assert _corpus_samples(prefix, 4, 99).tolist() == samples(4, *range(0, 28, 4)), "29 tokens are 7 samples of 4 and 1"
    assert _corpus_samples(prefix, 28, 1).tolist() == samples(28, 0)
    with pytest.raises(ConfigurationError, match="text has 29 tokens; one sample needs 30"):
        _corpus_samples(prefix, 29, 1)


def test_one_sample_needs_a_token_more_than_it_is_long(tmp_path: Path) -> None:
    assert _corpus_samples(corpus(tmp_path, 5), 4, 3).tolist() == samples(4, 0)
    with pytest.raises(ConfigurationError, match="has 5 tokens; one sample needs 6"):
        _corpus_samples(str(tmp_path / "text"), 5, 3)


def test_tokens_are_from_all_over_the_vocabulary_and_within_the_positions() -> None:
    config = small_config({"max_position_embeddings": 16})
    assert _tokens(config).tolist() == [[7919 * place % 250 for place in range(16)]]
    assert _tokens(small_config({"max_position_embeddings": 500})).shape == (1, 128)
    assert _tokens(small_config({"max_position_embeddings": 16, "position_embedding_type": "rope"})).shape == (1, 128)


def test_tokens_are_a_text_where_the_tokenizer_is_at_hand() -> None:
    text = (huggingface._TEXT * 2).encode()[:16]
    config = replace(small_config(), data=DataConfig(vocab_size=257, tokenizer_type="ByteTokenizer"))
    assert _tokens(config).tolist() == [list(text)]
    gone = DataConfig(vocab_size=250, tokenizer_type="HuggingFaceTokenizer", tokenizer_model="nowhere/at/all")
    assert _tokens(replace(config, data=gone)).tolist() == _tokens(small_config()).tolist()


def test_the_model_alone_is_in_fp32_on_one_process() -> None:
    config = small_config({"num_layers": 3}, {"tensor_model_parallel_size": 2, "world_size": 8}, {"bf16": True})
    alone = _alone(replace(config, training=replace(config.training, fp16=True)))
    assert (alone.training.bf16, alone.training.fp16, alone.model) == (False, False, config.model)
    assert (alone.layout.world_size, alone.layout.tensor_model_parallel_size, alone.layout.device) == (1, 1, "cpu")


def test_without_transformers_one_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    for compare in (huggingface.compare_logits, huggingface.compare_losses):
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
    assert by_transformers.mean_loss(model, tokens) == pytest.approx(-expected.item(), rel=1e-6)
    assert asked == [(8, 4), (3, 4)]


# Tokenizers.


class Letters:
    """A tokenizer of letters; some texts have other ids, and some decode into another text."""

    eod = 0
    vocab_size = 128

    def __init__(self, ids: dict[str, list[int]] | None = None, texts: dict[str, str] | None = None):
        self.ids, self.texts = ids or {}, texts or {}

    def encode(self, text: str) -> list[int]:
        return self.ids.get(text, [ord(letter) for letter in text])

    def decode(self, ids: Sequence[int]) -> str:
        text = "".join(map(chr, ids))
        return self.texts.get(text, text)

    def identity(self) -> dict[str, str | int]:
        return {"type": "Letters"}


def reader(**other: Any) -> _Reader:
    found = Letters(**other)
    return _Reader("a library", found.encode, found.decode)


TEXTS = ["a long text", "abc", "b", "xyz"]


def test_a_tokenizer_agrees_with_itself() -> None:
    _compare(reader(), Letters(), TEXTS)


def test_the_shortest_text_with_other_ids_is_shown() -> None:
    with pytest.raises(DataError) as raised:
        _compare(reader(ids={"abc": [1], "a long text": [2], "xyz": []}), Letters(), TEXTS)
    assert str(raised.value) == (
        "the exported tokenizer, read by a library, gives other ids than Letters on 3 of 4 texts. The shortest is "
        "'abc': [97, 98, 99] in training, [1] in the export. --skip-tokenizer-check exports the tokenizer all the "
        "same, --no-tokenizer leaves it out: encode with the training tokenizer then"
    )


def test_ids_that_become_another_text_are_shown() -> None:
    with pytest.raises(DataError) as raised:
        _compare(reader(texts={"abc": "ABC", "b": " b"}), Letters(), TEXTS)
    assert "decodes the ids of 2 of 4 texts into another text. The shortest is 'b': it becomes ' b'." in str(
        raised.value
    )


def test_what_the_training_tokenizer_does_not_bring_back_need_not_be_brought_back() -> None:
    _compare(reader(texts={"abc": "ABC"}), Letters(texts={"abc": "aBc"}), TEXTS)


def test_how_to_decode_is_not_asked_of_a_folder_that_was_copied() -> None:
    copied = HuggingFaceTokenizer.__new__(HuggingFaceTokenizer)
    vars(copied)["encode"] = Letters().encode
    _compare(reader(texts={"abc": "ABC"}), copied, TEXTS)


def test_long_values_are_cut() -> None:
    assert _short("x" * 198) == repr("x" * 198)
    assert _short("x" * 199) == repr("x" * 199)[:200] + " ..."


def test_a_document_must_end_with_the_same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported_tokenizer, "HuggingFaceTokenizer", lambda _folder: SimpleNamespace(eod=5))
    with pytest.raises(DataError, match="ends with id 0 in training and with id 5 in the exported tokenizer"):
        exported_tokenizer.check_ids(Path(), small_config(), Letters())  # pyright: ignore[reportArgumentType]


def test_probes_are_special_names_in_four_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exported_tokenizer, "probe_texts", lambda _tokenizer, count: [f"probe of {count}"])
    found = list(exported_tokenizer._probes(None, Letters()))  # pyright: ignore[reportArgumentType]
    assert found[0] == "probe of 1000"
    for text in ("<s>", "a <s> b", "x<s><s>y", " <s>.", "▁", "\t\n\n  x\r\n"):
        assert text in found


def run_of(prefix: str | None, **flags: Any) -> Any:
    data = DataConfig(data_path=(prefix,) if prefix else None, split="50,50,0")
    return replace(small_config(), data=replace(data, **flags))


def test_documents_are_those_of_the_validation_share_without_their_ends(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, *[10] * 8)
    texts, note = _held_out_texts(run_of(prefix), Letters())  # pyright: ignore[reportArgumentType]
    assert note is None
    assert texts == ["".join(map(chr, range(start, start + 10))) for start in (40, 50, 60, 70)]
    assert next(iter(_documents(prefix, (0.0, 1.0), 3))) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_training_data_takes_the_place_of_validation_data(tmp_path: Path) -> None:
    prefix = corpus(tmp_path, *[10] * 8)
    texts, _ = _held_out_texts(run_of(prefix, split="100,0,0"), Letters())  # pyright: ignore[reportArgumentType]
    assert len(texts) == 8
    assert _held_out_texts(run_of(None), Letters()) == ([], "the run names no data files")  # pyright: ignore


def test_data_that_is_no_longer_there_or_damaged_keeps_no_model_from_being_exported(tmp_path: Path) -> None:
    """A checkpoint may have come from another machine."""
    prefix = corpus(tmp_path, *[10] * 8)
    (tmp_path / "text.bin").write_bytes(b"")
    for path in (str(tmp_path / "nothing"), prefix):
        texts, note = _held_out_texts(run_of(path), Letters())  # pyright: ignore[reportArgumentType]
        assert texts == []
        assert str(note).startswith(f"--data-path {path} cannot be read (")


def test_documents_are_from_all_over_and_cut(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "many", np.uint16) as writer:
        for number in range(200):
            writer.add_tokens(np.full(2000, number, np.uint16).tobytes(), [2000])
    found = list(_documents(str(tmp_path / "many"), (0.0, 1.0), 7))
    assert len(found) == 64
    assert [document[0] for document in found] == list(range(0, 192, 3))
    assert {len(document) for document in found} == {1024}
