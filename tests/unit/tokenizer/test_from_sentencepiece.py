"""A SentencePiece model that the library `tokenizers` runs normalizes text by its own table."""

import unicodedata
from pathlib import Path

import sentencepiece
from tokenizers import normalizers

from megatron_ext.tokenizer.from_sentencepiece import from_sentencepiece

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"


def test_characters_of_which_the_two_tables_differ_are_normalized_as_in_the_model() -> None:
    """Both normalize to NFKC, sentencepiece by a newer Unicode than `tokenizers`."""
    path = GOLDEN / "spm_unigram.model"
    known = sentencepiece.SentencePieceProcessor(model_file=str(path))
    own, other = from_sentencepiece(path.read_bytes()).normalizer, normalizers.NFKC()
    letters = [chr(code) for code in range(0x110000) if unicodedata.normalize("NFKC", chr(code)) != chr(code)]
    expected = {letter: known.normalize(letter).strip("▁") for letter in letters}
    surprising = [letter for letter in letters if other.normalize_str(letter).strip(" ") != expected[letter]]
    assert len(surprising) > 100
    assert own is not None
    assert {letter: own.normalize_str(letter).strip("▁") for letter in surprising} == {
        letter: expected[letter] for letter in surprising
    }
