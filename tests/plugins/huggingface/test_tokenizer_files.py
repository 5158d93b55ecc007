"""A tokenizer that is exported as tokenizer.json gives the ids of training."""

import base64
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.huggingface import tokenizer_files as exported
from megatron_ext.tokenizer.from_flags import build_tokenizer
from megatron_ext.tokenizer.simple import ByteTokenizer

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"


HF = str(GOLDEN / "hf_bpe")


def test_the_end_of_a_document_is_no_text_of_an_exported_tokenizer() -> None:
    """Whoever generates with it leaves special tokens out."""
    made = exported._bytes(ByteTokenizer())
    assert made.decode([97, 256, 98]) == "ab"
    assert made.decode([97, 256], skip_special_tokens=False) == "a<|endoftext|>"


def _sentencepiece(tmp_path: Path, kind: str, **settings: Any) -> str:
    lines = [json.loads(line)["text"] for line in (GOLDEN / "input.jsonl").read_text().splitlines()][:60]
    model = BytesIO()
    options: dict[str, Any] = {"byte_fallback": True, "normalization_rule_name": "identity"} | settings
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in lines for line in text.splitlines() if line),
        model_writer=model, vocab_size=420, model_type=kind, num_threads=1, minloglevel=2, hard_vocab_limit=False,
        **options,
    )  # fmt: skip
    path = tmp_path / f"{kind}.model"
    path.write_bytes(model.getvalue())
    return str(path)


EXPORTED_TEXTS = [
    "", " ", "First Citizen:  two  spaces ", " leading", "trailing  ", "a<sym>b<symbol> c", "</s><s><unk>", "<0x41>",
    "1234 5 é ß 中文 😀 \n\n\tx", "can't  WE'LL HTTPServer camelCase", "\u00ad\u00a0soft", "▁▁ ▁x", "the the the",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"user_defined_symbols": ["<sym>", "<symbol>"]},
        {"remove_extra_whitespaces": False, "add_dummy_prefix": False},
        {"add_dummy_prefix": False},
        {"byte_fallback": False, "unk_id": 2, "bos_id": 0, "eos_id": 1},
    ],
    ids=["plain", "symbols", "as it is", "no prefix", "unknown"],
)
def test_a_sentencepiece_model_is_exported_with_its_ids(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    tokenizer = build_tokenizer("SentencePieceTokenizer", _sentencepiece(tmp_path, kind, **settings))
    assert exported.write_tokenizer(tokenizer, tmp_path) == ["tokenizer.json", "tokenizer_config.json"]
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True  # as transformers does for split_special_tokens
    lines = [json.loads(line)["text"] for line in (GOLDEN / "input.jsonl").read_text().splitlines()][60:100]
    # The name of a control piece is cut in two: a unigram model without bytes then has an unknown on either side.
    is_apart = kind == "unigram" and "unk_id" in settings
    for text in [text for text in [*EXPORTED_TEXTS, *lines] if not (is_apart and "</s>" in text)]:
        assert theirs.encode(text, add_special_tokens=False).ids == tokenizer.encode(text), repr(text)
    for text in lines:
        ids = tokenizer.encode(text)
        assert "unk_id" in settings or theirs.decode(ids) == tokenizer.decode(ids)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "split_special_tokens": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"treat_whitespace_as_suffix": True}, "was trained with treat_whitespace_as_suffix"),
        ({"model_type": "char"}, "is neither unigram nor BPE"),
    ],
)
def test_a_model_that_tokenizer_json_cannot_express_is_refused(
    tmp_path: Path, settings: dict[str, Any], problem: str
) -> None:
    kind = settings.pop("model_type", "bpe")
    tokenizer = build_tokenizer("SentencePieceTokenizer", _sentencepiece(tmp_path, kind, **settings))
    with pytest.raises(ConfigurationError, match=f"^the SentencePiece model {problem}, which tokenizer.json cannot"):
        exported.write_tokenizer(tokenizer, tmp_path)


@pytest.mark.parametrize("pattern", ["v1", "v2"])
def test_a_tiktoken_vocabulary_is_exported_with_its_ids(tmp_path: Path, pattern: str) -> None:
    """Special tokens are found in a text first; one of the same text among the others is never found."""
    pieces = [b"th", b"the", b" the", b"HT", b"TP", b"HTTP", b"ca", b"can", b"</", b"</s>", b"ab", b"abc", b"bc", b"12"]
    tokens = [*(bytes([number]) for number in range(256)), *pieces]
    entries = [
        {"rank": number, "token_bytes": base64.b64encode(token).decode(), "token_str": ""}
        for number, token in enumerate(tokens)
    ]
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    tokenizer: Any = build_tokenizer(
        "TikTokenizer", str(tmp_path / "vocab.json"), len(tokens) + 9, tiktoken_num_special_tokens=9,
        tiktoken_pattern=pattern,
    )  # fmt: skip
    exported.write_tokenizer(tokenizer, tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in [*EXPORTED_TEXTS, "abc abcabc", "x</s>y<SPECIAL_8>", "12 HTTP can't"]:
        assert theirs.encode(text).ids == tokenizer.encode(text), repr(text)
        assert theirs.decode(tokenizer.encode(text), skip_special_tokens=False) == tokenizer.decode(
            tokenizer.encode(text)
        )
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["unk_token"]) == ("</s>", "<unk>")
    assert "split_special_tokens" not in config


def test_bytes_are_exported_with_their_ids(tmp_path: Path) -> None:
    """Each of them; the end of a document is no text. A configuration that is there stays."""
    tokenizer = ByteTokenizer()
    (tmp_path / "tokenizer_config.json").write_text("{}")
    exported.write_tokenizer(tokenizer, tmp_path)
    assert (tmp_path / "tokenizer_config.json").read_text() == "{}"
    (tmp_path / "tokenizer_config.json").unlink()
    exported.write_tokenizer(tokenizer, tmp_path)
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert theirs.get_vocab_size() == 257
    theirs.encode_special_tokens = True
    for text in [*EXPORTED_TEXTS, "".join(map(chr, range(0x180))), "<|endoftext|>"]:
        assert theirs.encode(text).ids == tokenizer.encode(text)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["eos_token"], config["split_special_tokens"]) == ("<|endoftext|>", True)
    assert exported.write_tokenizer(build_tokenizer("NullTokenizer", vocab_size=9), tmp_path / "none") == []


def test_a_tokenizer_of_the_library_is_exported_with_its_end(tmp_path: Path) -> None:
    tokenizer: Any = build_tokenizer("HuggingFaceTokenizer", HF, special_tokens=["<x>"])
    exported.write_tokenizer(tokenizer, tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    again = build_tokenizer("HuggingFaceTokenizer", str(tmp_path))
    assert again.encode("a<x>b") == tokenizer.encode("a<x>b")
    assert (again.vocab_size, again.eod) == (tokenizer.vocab_size, tokenizer.eod)
