"""--fim-data: what documents become, how often, and that the draws follow from a sample's place alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ext.config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.fill_in_the_middle import Rearrangement
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.errors import ConfigurationError
from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from tests.support.instructions import write_tokenizer

SEQ = 64
MARKS = ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>", "<file>")
TEXTS = [f"def add_{number}(a, b):\n    return a + b + {number}\n" for number in range(30)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write_tokenizer(tmp_path_factory.mktemp("data") / "tokenizer"), MARKS)


def config(folder: Path | None = None, **data: Any) -> Config:
    path = {} if folder is None else {"train_data_path": (str(folder / "text"),), "data_cache_path": str(folder)}
    data = {"fim_data": True, **path, **data}
    return Config(model=ModelConfig(seq_length=SEQ), training=TrainingConfig(seed=5), data=DataConfig(**data))


def changed(tokenizer: HuggingFaceTokenizer, text: str, seed: int, **data: Any) -> str:
    change = Rearrangement.of(config(**data), tokenizer)
    ids = np.asarray(tokenizer.encode_rendered(text)[0], np.int64)
    return tokenizer.decode(change.of_tokens(ids, np.random.default_rng(seed)).tolist())


def restored(text: str) -> str:
    """Return the text that was rearranged into this one."""
    before, _, middle = text.partition("<fim_middle>")
    if before.startswith("<fim_prefix><fim_suffix>"):  # the prefix follows in one piece with the middle
        return middle + before.removeprefix("<fim_prefix><fim_suffix>")
    prefix, _, suffix = before.removeprefix("<fim_prefix>").partition("<fim_suffix>")
    return prefix + middle + suffix


def test_every_character_of_a_document_stays(tokenizer: HuggingFaceTokenizer) -> None:
    for seed, text in enumerate(TEXTS):
        found = changed(tokenizer, text, seed, fim_rate=1.0)
        assert [found.count(mark) for mark in MARKS] == [1, 1, 1, 0, 0]
        assert restored(found) == text


def test_shares_are_those_of_the_flags(tokenizer: HuggingFaceTokenizer) -> None:
    """Of 2,000 draws; the bounds are four standard deviations."""
    found = [changed(tokenizer, "some text", seed, fim_rate=0.3, fim_spm_rate=0.2) for seed in range(2000)]
    moved = [text for text in found if text != "some text"]
    assert abs(len(moved) - 600) < 82
    # Those without a prefix look alike in both forms: 0.19 of two draws from 0 to 9 hold a 0.
    spm = sum(text.startswith("<fim_prefix><fim_suffix>") for text in moved)
    assert abs(spm / len(moved) - (0.2 + 0.8 * 0.19)) < 0.078


def test_cuts_are_even_over_the_characters(tokenizer: HuggingFaceTokenizer) -> None:
    """Two even draws over 0 to 9 of nine characters: the mean of the lesser is 2.85, of the greater 6.15."""
    found = [changed(tokenizer, "abcdefghi", seed, fim_rate=1.0, fim_spm_rate=0.0) for seed in range(2000)]
    prefixes = [len(text.partition("<fim_suffix>")[0]) - len("<fim_prefix>") for text in found]
    middles = [len(text.partition("<fim_middle>")[2]) for text in found]
    assert np.mean(prefixes) == pytest.approx(2.85, abs=0.25)
    assert np.mean(middles) == pytest.approx(3.3, abs=0.25)


def test_documents_and_fragments_are_drawn_by_themselves(tokenizer: HuggingFaceTokenizer) -> None:
    end = tokenizer.end_of_document
    text = f"one{end}two{end}{end}three"
    assert [restored(part) for part in changed(tokenizer, text, 3, fim_rate=1.0).split(end)] == [
        *("one", "two", "", "three")
    ]
    files = "first<file>#no second<file>third"
    flags = {"fim_split_sample": "<file>", "fim_rate": 1.0, "fim_no_prefix": "#no"}
    first, second, third = changed(tokenizer, files, 3, **flags, fim_fragment_rate=1.0).split("<file>")
    assert (restored(first), second, restored(third)) == ("first", "#no second", "third")
    assert changed(tokenizer, files, 3, **flags, fim_fragment_rate=0.0) == files
    assert changed(tokenizer, files, 3, **{**flags, "fim_rate": 0.0}, fim_fragment_rate=1.0) == files


def test_a_text_that_is_cut_within_a_character_is_left(tokenizer: HuggingFaceTokenizer) -> None:
    ids = np.asarray(tokenizer.encode_rendered("日本語")[0], np.int64)[1:]
    change = Rearrangement.of(config(fim_rate=1.0), tokenizer)
    assert change.of_tokens(ids, np.random.default_rng(0)).tolist() == ids.tolist()


def test_a_token_that_the_tokenizer_lacks_is_named(tokenizer: HuggingFaceTokenizer) -> None:
    with pytest.raises(
        ConfigurationError, match=r"--fim-pad-token <nothing> is \d+ tokens .*--tokenizer-special-tokens"
    ):
        Rearrangement.of(config(fim_pad_token="<nothing>"), tokenizer)


@pytest.mark.parametrize("order", ["shuffled", "formula"])
def test_samples_keep_their_length_and_follow_from_their_place(
    order: str, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    with IndexedWriter(tmp_path / "text", np.uint16) as writer:
        for text in TEXTS * 4:
            ids = np.asarray([*tokenizer.encode_rendered(text)[0], tokenizer.eod], np.uint16)
            writer.add_tokens(ids.tobytes(), [len(ids)])

    def samples(**data: Any) -> list[dict[str, np.ndarray]]:
        flags = config(tmp_path, data_order=order, **data)
        train = build_datasets(flags, tokenizer, Splits(20, 0, 0)).train
        assert train is not None
        return [{name: np.asarray(value) for name, value in train[index].items()} for index in range(20)]

    plain, moved, again = samples(fim_data=False), samples(fim_rate=0.5), samples(fim_rate=0.5)
    prefix, pad = (tokenizer.encode_rendered(mark)[0][0] for mark in ("<fim_prefix>", "<fim_pad>"))
    for before, one, same in zip(plain, moved, again, strict=True):
        assert {name: value.shape for name, value in one.items()} == dict.fromkeys(before, (SEQ,))
        assert all((one[name] == same[name]).all() for name in one)
        assert (one["labels"][:-1] == one["tokens"][1:]).all()
        assert ((one["labels"] == pad) <= (one["loss_mask"] == 0)).all()
    assert sum((one["tokens"] == prefix).sum() for one in moved) > 10
    none = samples(fim_rate=0.0, eod_mask_loss=True)
    assert all((a["tokens"] == b["tokens"]).all() for a, b in zip(plain, none, strict=True))
    assert all(((one["tokens"] == tokenizer.eod) == (one["loss_mask"] == 0)).all() for one in none)
