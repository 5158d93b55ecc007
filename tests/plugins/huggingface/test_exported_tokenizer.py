"""What counts as agreement of an exported tokenizer with that of the training, without transformers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_ext.config.schema import DataConfig
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.errors import DataError
from megatron_ext.plugins.huggingface import exported_tokenizer
from megatron_ext.plugins.huggingface.exported_tokenizer import _compare, _documents, _held_out_texts, _Reader, _short
from megatron_ext.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from tests.support.corpora import corpus_of
from tests.support.small_models import small_config

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
    prefix = corpus_of(tmp_path, *[10] * 8)
    texts, note = _held_out_texts(run_of(prefix), Letters())  # pyright: ignore[reportArgumentType]
    assert note is None
    assert texts == ["".join(map(chr, range(start, start + 10))) for start in (40, 50, 60, 70)]
    assert next(iter(_documents(prefix, (0.0, 1.0), 3))) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_training_data_takes_the_place_of_validation_data(tmp_path: Path) -> None:
    prefix = corpus_of(tmp_path, *[10] * 8)
    texts, _ = _held_out_texts(run_of(prefix, split="100,0,0"), Letters())  # pyright: ignore[reportArgumentType]
    assert len(texts) == 8
    assert _held_out_texts(run_of(None), Letters()) == ([], "the run names no data files")  # pyright: ignore


def test_data_that_is_no_longer_there_or_damaged_keeps_no_model_from_being_exported(tmp_path: Path) -> None:
    """A checkpoint may have come from another machine."""
    prefix = corpus_of(tmp_path, *[10] * 8)
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
