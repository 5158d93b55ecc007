"""Text that holds special pieces gets the reference's ids, whichever tokenizer and wherever the piece stands."""

import base64
import json
import random
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
from tokenizers import Tokenizer as Library

from megatron_ext.plugins.prepare.commands import preprocess_data
from megatron_ext.plugins.prepare.encode_many import fast_encoder, first_difference, plain_encoder
from megatron_ext.plugins.prepare.guarded_encoder import Guarded, SpecialPieces
from megatron_ext.tokenizer.from_flags import build_tokenizer
from megatron_ext.tokenizer.probe_texts import probe_texts, special_texts
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"
TEXTS = [json.loads(line)["text"] for line in (GOLDEN / "input.jsonl").read_text().splitlines()]


def hugging_face(folder: Path, normalizer: dict[str, str] | None = None, **settings: Any) -> Tokenizer:
    """A folder with an added token of every kind."""
    shutil.copytree(GOLDEN / "hf_bpe", folder)
    model = json.loads((folder / "tokenizer.json").read_text())
    added = {
        "<tool>": "lstrip",
        "[B]": "rstrip",
        "word": "single_word",
        "é": "normalized",
        "  ": "normalized",
        "中": "",
    }
    for number, (content, name) in enumerate(added.items(), len(model["model"]["vocab"])):
        flags = {flag: flag == name for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")}
        model["added_tokens"].append({"id": number, "content": content, **flags})
    model["normalizer"] = normalizer
    (folder / "tokenizer.json").write_text(json.dumps(model))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | settings))
    return build_tokenizer("HuggingFaceTokenizer", str(folder))


def sentence_piece(folder: Path, symbols: tuple[str, ...] = (), rule: str = "identity", **flags: Any) -> Tokenizer:
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in TEXTS for line in text.splitlines() if line),
        model_writer=model,
        vocab_size=500,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name=rule,
        remove_extra_whitespaces=False,
        user_defined_symbols=list(symbols),
        minloglevel=2,
        **flags,
    )
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return build_tokenizer("SentencePieceTokenizer", str(folder / "tokenizer.model"))


def tiktoken(folder: Path) -> Tokenizer:
    words = {word.encode()[:size] for text in TEXTS[:40] for word in text.split() for size in range(2, 6)}
    tokens = [bytes([n]) for n in range(256)] + sorted(word for word in words if len(word) > 1)
    entries = [{"rank": n, "token_bytes": base64.b64encode(token).decode()} for n, token in enumerate(tokens)]
    folder.mkdir()
    (folder / "vocabulary.json").write_text(json.dumps(entries))
    return build_tokenizer("TikTokenizer", str(folder / "vocabulary.json"), len(tokens) + 1000)


def gpt2(folder: Path) -> Tokenizer:
    folder.mkdir()
    library: Any = Library.from_file(str(GOLDEN / "hf_bpe" / "tokenizer.json"))
    vocabulary, merged = library.model.save(str(folder))
    return build_tokenizer(
        "GPT2BPETokenizer", vocab_file=vocabulary, merge_file=merged, special_tokens=["<tool>", "a b"]
    )


KINDS: dict[str, Callable[[Path], Tokenizer]] = {
    "HuggingFaceTokenizer": hugging_face,
    "of normalized text": lambda folder: hugging_face(folder, {"type": "NFC"}),
    "that splits special tokens": lambda folder: hugging_face(folder, split_special_tokens=True),
    "SentencePieceTokenizer": sentence_piece,
    "with symbols": lambda folder: sentence_piece(folder, ("<tool>", "lo", "a▁b", "▁▁"), control_symbols=["<control>"]),
    "with symbols of normalized text": lambda folder: sentence_piece(folder, ("<tool>", "fi"), "nfkc"),
    "TikTokenizer": tiktoken,
    "GPT2BPETokenizer": gpt2,
}


def texts_with(pieces: list[str], count: int, seed: int) -> list[str]:
    """Texts that hold a piece, a part of one, or what is normalized to one, at the beginning, the end or inside."""
    chooser = random.Random(seed)
    forms: list[Callable[[str], str]] = [
        str,
        str,
        lambda piece: piece[chooser.randint(0, len(piece)) :],
        lambda piece: piece[: chooser.randint(0, len(piece))],
        lambda piece: piece.replace("▁", " ").replace("é", "e\u0301"),
        lambda piece: "".join(chr(ord(one) + 0xFEE0) if "!" <= one <= "~" else one for one in piece),  # full width
    ]
    texts = []
    for _ in range(count):
        text = chooser.choice(TEXTS)[: chooser.choice((0, 3, 30, 200))]
        for _ in range(chooser.randint(1, 3)):
            piece = chooser.choice(forms)(chooser.choice(pieces))
            at = chooser.choice((0, len(text), chooser.randint(0, len(text))))
            before, behind = chooser.choice(("", " ", "  ", "\n", "x")), chooser.choice(("", " ", "\n", "x"))
            text = f"{text[:at]}{before}{piece}{behind}{text[at:]}"
        texts.append(text)
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_special_pieces_in_every_position(tmp_path: Path, kind: str):
    tokenizer = KINDS[kind](tmp_path / "tokenizer")
    fast, plain = fast_encoder(tokenizer), plain_encoder(tokenizer)
    assert first_difference(fast, plain, probe_texts(tokenizer)) is None  # else preprocessing would not use it at all
    texts = texts_with(special_texts(tokenizer), 600, seed=5)
    assert first_difference(fast, plain, texts) is None
    assert first_difference(fast, plain, [" and ".join(texts[:200])]) is None


def test_a_control_piece_late_in_the_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """No probe and no sample holds it; the summary counts the text that the reference has encoded."""
    sentence_piece(tmp_path / "tokenizer")
    texts = [*(TEXTS[100] for _ in range(6000)), "the <s>lower</s> newest", *(TEXTS[100] for _ in range(3000))]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    for name, flags in (("fast", ["--workers", "2"]), ("plain", ["--plain-tokenizer"])):
        argv = ["--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / name), *flags]
        model = str(tmp_path / "tokenizer" / "tokenizer.model")
        assert (
            preprocess_data.main([*argv, "--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model]) == 0
        )
        lines = capsys.readouterr().err.splitlines()
        assert ("fast tokenizer: equal on" in lines[0]) == (name == "fast")
        assert (" tokens, 1 texts by the plain tokenizer (" in lines[-1]) == (name == "fast")
    for suffix in ("bin", "idx"):
        fast, plain = (tmp_path / f"{name}_text_document.{suffix}" for name in ("fast", "plain"))
        assert fast.read_bytes() == plain.read_bytes()


def test_only_the_words_around_a_piece_take_the_reference(tmp_path: Path):
    tokenizer = build_tokenizer("GPT2BPETokenizer", **_files(tmp_path), special_tokens=["<tool>"])
    fast = fast_encoder(tokenizer)
    assert isinstance(fast, Guarded)
    seen: list[str | bytes] = []
    plain = plain_encoder(tokenizer)

    def reference(texts: Any) -> tuple[np.ndarray, np.ndarray]:
        seen.extend(texts)
        return plain(texts)

    guarded = Guarded(fast._encoder, reference, can_be_cut=True, special=SpecialPieces(["<tool>"]))
    text = "some words and others " * 2000 + "<tool>" + " more of the words" * 2000
    assert np.array_equal(guarded([text, "none"])[0], plain([text, "none"])[0])
    assert guarded.by_reference == 1
    assert sum(map(len, seen)) < 3000


def _files(folder: Path) -> dict[str, Any]:
    library: Any = Library.from_file(str(GOLDEN / "hf_bpe" / "tokenizer.json"))
    vocabulary, merged = library.model.save(str(folder))
    return {"vocab_file": vocabulary, "merge_file": merged}


def test_pieces_are_found_as_a_plain_search_finds_them():
    chooser = random.Random(2)
    for _ in range(200):
        pieces = ["".join(chooser.choices("ab.▁|", k=chooser.randint(1, 4))) for _ in range(chooser.randint(0, 9))]
        special = SpecialPieces(pieces)
        for _ in range(20):
            text = "".join(chooser.choices("ab.▁|c", k=chooser.randint(0, 12)))
            found = any(piece in text for piece in pieces)
            assert special.are_in(text) == special.are_in(text.encode()) == found
