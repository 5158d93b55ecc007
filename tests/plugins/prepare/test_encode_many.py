"""The fast tokenizer gives the reference's ids, and where it would not, it is not used."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import gigatoken
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from megatron_ext.plugins.prepare import preprocess
from megatron_ext.plugins.prepare.encode_many import _Gigatoken, fast_encoder, first_difference, plain_encoder
from megatron_ext.plugins.prepare.guarded_encoder import Guarded, SpecialPieces, has_unassigned, joined
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files
from megatron_ext.plugins.prepare.tokenizer_training import train_sentencepiece
from megatron_ext.tokenizer.from_flags import build_tokenizer
from megatron_ext.tokenizer.probe_texts import probe_texts, special_texts
from megatron_ext.tokenizer.tokenizer_protocol import Text, as_string

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"
HF = str(GOLDEN / "hf_bpe")


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("type", "model"), [("HuggingFaceTokenizer", HF), ("ByteTokenizer", None)])
def test_random_unicode(type: str, model: str | None, seed: int):
    tokenizer = build_tokenizer(type, model)
    fast, plain = fast_encoder(tokenizer), plain_encoder(tokenizer)
    texts = probe_texts(tokenizer, 1500, seed)
    assert len(texts) == 1500
    assert first_difference(fast, plain, texts) is None
    found, expected = fast(texts), plain(texts)
    assert np.array_equal(found[0], expected[0])
    assert np.array_equal(found[1], expected[1])


def test_every_character_is_split_off_as_the_reference_does():
    # Two programs with two Unicode tables: where they differ, the characters must be among those that are guarded.
    reference = pre_tokenizers.ByteLevel(add_prefix_space=False)
    different, guarded = [], 0
    for point in (*range(0x3400), *range(0xA000, 0xAC00), *range(0xF900, 0x20000), *range(0x2A6D0, 0x323B0, 7)):
        text = "a{0}!{0}1{0} {0}".format(chr(point))
        pieces = [text[begin:end].encode() for _, (begin, end) in reference.pre_tokenize_str(text)]
        if list(gigatoken.pretokenizer(text.encode())) != pieces:
            different.append(chr(point))
            guarded += has_unassigned(chr(point))
    assert guarded == len(different), [hex(ord(one)) for one in different if not has_unassigned(one)][:20]


def test_characters_younger_than_the_tables_take_the_reference():
    tokenizer = build_tokenizer("HuggingFaceTokenizer", HF)
    texts = ["plain", 'young \ua7cf",\n    None', "", "é", "\U000e0080", "\ua7cf"]
    found, expected = fast_encoder(tokenizer)(texts), plain_encoder(tokenizer)(texts)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()
    for _ in range(2):  # looked up, and known from before
        found = [has_unassigned(f"a{chr(point)}b") for point in (0x41, 0xE9, 0x4E2D, 0x1F600, 0x378, 0xE0080)]
        assert found == [False] * 4 + [True] * 2


def test_only_the_words_around_a_young_character_take_the_reference():
    tokenizer = build_tokenizer("HuggingFaceTokenizer", HF)
    plain, fast = plain_encoder(tokenizer), fast_encoder(tokenizer)
    assert isinstance(fast, Guarded)
    seen: list[str] = []

    def reference(texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        seen.extend(map(as_string, texts))
        return plain(texts)

    guarded = Guarded(fast._encoder, reference, can_be_cut=True, special=SpecialPieces([]))
    words = "some words, été 中文 and 12 numbers;  two spaces\n" * 400
    text = f"{words}\ua7cf{words}an \ua7cf{words}"
    found, expected = guarded(["first", text, ""]), plain(["first", text, ""])
    assert np.array_equal(found[0], expected[0])
    assert np.array_equal(found[1], expected[1])
    assert len(seen) == 2
    assert sum(map(len, seen)) < 3000 < len(text) // 10


def test_no_texts():
    for encoder in (
        fast_encoder(build_tokenizer("HuggingFaceTokenizer", HF)),
        fast_encoder(build_tokenizer("ByteTokenizer")),
    ):
        ids, lengths = encoder([])
        assert (len(ids), len(lengths)) == (0, 0)


@pytest.mark.parametrize(
    ("single", "before", "after"), [(["B", "A"], [1], []), (["B", "A", "E"], [1], [0]), (["A", "E", "B"], [], [0, 1])]
)
def test_ids_that_a_template_adds(tmp_path: Path, single: list[str], before: list[int], after: list[int]):
    shutil.copytree(HF, tmp_path / "hf")
    model = json.loads((tmp_path / "hf" / "tokenizer.json").read_text())
    vocabulary = {name: {"id": name, "ids": [n], "tokens": [name]} for name, n in (("B", 1), ("E", 0))}
    template = [
        {"Sequence": {"id": "A", "type_id": 0}} if name == "A" else {"SpecialToken": {"id": name, "type_id": 0}}
        for name in single
    ]
    model["post_processor"] = {
        "type": "TemplateProcessing", "single": template, "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": vocabulary,
    }  # fmt: skip
    (tmp_path / "hf" / "tokenizer.json").write_text(json.dumps(model))
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "hf"))
    assert tokenizer.encode("") == before + after
    texts = ["", "one", "two words", "", ""]
    found, expected = fast_encoder(tokenizer)(texts), plain_encoder(tokenizer)(texts)
    assert found[0].tolist() == expected[0].tolist()
    assert found[1].tolist() == expected[1].tolist()


def test_what_is_not_covered_is_said():
    with pytest.raises(ValueError, match="gigatoken does not cover it: only BPE sentencepiece models"):
        fast_encoder(build_tokenizer("SentencePieceTokenizer", str(GOLDEN / "spm_unigram.model")))
    with pytest.raises(ValueError, match="there is none for NullTokenizer"):
        fast_encoder(build_tokenizer("NullTokenizer", vocab_size=10))


def test_sentencepiece_bpe_is_used_only_if_equal(tmp_path: Path):
    lines = [json.loads(line)["text"] for line in (GOLDEN / "input.jsonl").read_text().splitlines()]
    train_sentencepiece(lines, 600, tmp_path, "bpe")
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "tokenizer.model"))
    job = EncodeJob(
        (str(GOLDEN / "input.jsonl"),), str(tmp_path / "a"), "SentencePieceTokenizer", str(tmp_path / "tokenizer.model")
    )
    notes: list[str] = []
    encode_files(job, note=notes.append)
    ids = [token for line in lines for token in tokenizer.encode(line)]
    assert np.fromfile(tmp_path / "a_text_document.bin", np.uint16).tolist() == ids
    assert len(notes) == 1


class Wrong:
    """The plain encoder, but one character is read as another."""

    def __init__(self, character: str):
        self._plain = plain_encoder(build_tokenizer("ByteTokenizer"))
        self._character = character

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        return self._plain([text.replace(self._character, "?") for text in texts])


@pytest.mark.parametrize(
    ("character", "note"),
    [
        ("z", "no fast tokenizer: it differs from ByteTokenizer on"),  # a probe
        ("\U000e0001", "no fast tokenizer: it differs from ByteTokenizer on '\\U000e0001first'"),  # the first block
        ("\U000e0002", "the fast tokenizer differs from ByteTokenizer on"),  # the sample at the end
    ],
)
def test_a_wrong_fast_tokenizer_never_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, character: str, note: str):
    source = tmp_path / "in.jsonl"
    texts = [f"{chr(0xE0001)}first", *["word " * 2000] * 200, *[chr(0xE0002) + " word" * 2000] * 300]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(preprocess, "probe_texts", lambda tokenizer: ["fizz"])
    job = EncodeJob((str(source),), str(tmp_path / "plain"), "ByteTokenizer", fast_tokenizer=False)
    encode_files(job)
    monkeypatch.setattr(preprocess, "fast_encoder", lambda tokenizer: Wrong(character))
    notes: list[str] = []
    encode_files(EncodeJob((str(source),), str(tmp_path / "fast"), "ByteTokenizer"), note=notes.append)
    assert any(text.startswith(note) for text in notes)
    for suffix in ("bin", "idx"):
        fast, plain = (tmp_path / f"{name}_text_document.{suffix}" for name in ("fast", "plain"))
        assert fast.read_bytes() == plain.read_bytes()


@pytest.mark.parametrize("together", [True, False])
def test_what_the_reference_alone_accepts_is_a_difference(together: bool):
    """And what neither accepts, or the fast one alone, is none: no run gets past such a text."""

    def refusing(letters: str) -> Callable[[Sequence[Text]], tuple[np.ndarray, np.ndarray]]:
        plain = plain_encoder(build_tokenizer("ByteTokenizer"))

        def encode(texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
            if any(letter in as_string(text) for letter in letters for text in texts):
                raise TypeError if together else ValueError
            return plain(texts)

        return encode

    texts = ["one", "x", "two", "y", "z"]
    assert first_difference(refusing("y"), refusing(""), texts) == "y"
    assert first_difference(refusing("xy"), refusing("x"), texts) == "y"
    assert first_difference(refusing("x"), refusing("xy"), texts) is None
    assert first_difference(refusing(""), refusing("xyz"), texts) is None


def test_probes_hold_thirty_special_texts_at_most(tmp_path: Path):
    special = [f"<{number}>" for number in range(40)]
    tokenizer = build_tokenizer("HuggingFaceTokenizer", HF, special_tokens=special)
    assert special_texts(tokenizer) == ["<|endoftext|>", *special]
    assert special_texts(build_tokenizer("ByteTokenizer")) == []
    named = probe_texts(tokenizer)
    assert [f" {text}." in named for text in special] == [True] * 29 + [False] * 11
    assert probe_texts(tokenizer) == named


@pytest.mark.parametrize("length", [0, 1])
def test_no_texts_and_one_are_joined(length: int):
    ids, lengths = joined([np.array([5, 6])] * length)
    assert (ids.tolist(), lengths.tolist()) == ([5, 6] * length, [2] * length)


def test_ids_of_a_template_stand_around_each_text_in_their_order():
    """Two before and two after, also where a text has none of its own."""
    framed = _Gigatoken(None, [1, 2], [8, 9])._frame(np.array([5, 6, 7], np.uint32), np.array([2, 0, 1]))
    assert framed[0].tolist() == [1, 2, 5, 6, 8, 9, 1, 2, 8, 9, 1, 2, 7, 8, 9]
    assert framed[1].tolist() == [6, 4, 5]
