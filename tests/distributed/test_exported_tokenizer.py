"""The tokenizer of an export gives transformers the ids of training, for every type; where it does not, nothing is
exported."""

import base64
import json
import shutil
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import yaml
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.huggingface.commands.convert_checkpoint import main as convert
from megatron_ext.plugins.prepare.tokenizer_training import train_bytelevel_bpe, train_sentencepiece
from megatron_ext.plugins.tasks.commands.generate_sample import main as generate
from megatron_ext.tokenizer.from_flags import build_tokenizer
from megatron_ext.tokenizer.tiktoken import DEFAULT_SPECIAL_TOKENS
from tests.support.corpora import write_documents
from tests.support.hf_models import quiet_transformers, write_model
from tests.support.hf_shapes import VOCABULARY

# Of the second tier: tests/unit/tokenizer, and a type in tests/distributed/test_huggingface.py.
pytestmark = pytest.mark.full

quiet_transformers()

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "preprocess"
LINES = [json.loads(line)["text"] for line in (GOLDEN / "input.jsonl").read_text().splitlines()]

TEXTS = [
    *("", " ", "\n", "word", "  two  spaces  ", "a\tb\r\n\n c", "Grüße, Привет мир! こんにちは世界 مرحبا नमस्ते 한국어"),
    *(
        "e\u0301 n\u0303\u0323 ﬁ ① ½",
        "👩‍👩‍👧‍👦 🇩🇪 ☃\ufe0f",
        "\x00\x01\x7f\x85\u200b\ufeff",
        "1234567890 3.14",
        "x" * 3000,
        "▁ a▁b",
    ),
    *(
        "</s>",
        "a</s>b <s> <unk>",
        "<0x0A> <pad><cls>",
        "<|endoftext|> x<|endoftext|>y",
        "<x> a<x>b <x><x>",
        "<SPECIAL_9>",
    ),
    "def f(x):\n    return {'a': x ** 2}  # done\n\n\n\tif x != 0xFF:\n",
    *LINES[:5],
]


def _sentencepiece(folder: Path, **settings: Any) -> dict[str, Any]:
    """A model as train_tokenizer.py does not train it."""
    model = BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in LINES for line in text.splitlines() if line),
        model_writer=model,
        vocab_size=500,
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
        **settings,
    )
    (folder / "own.model").write_bytes(model.getvalue())
    return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(folder / "own.model")}


def _trained(folder: Path, model_type: str) -> dict[str, Any]:
    train_sentencepiece(LINES, 600, folder, model_type)
    return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(folder / "tokenizer.model")}


def _huggingface(folder: Path, special: tuple[str, ...] | None = None) -> dict[str, Any]:
    train_bytelevel_bpe(LINES, 400, folder)
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    return flags if special is None else {**flags, "tokenizer_special_tokens": special}


def _gpt2(folder: Path) -> dict[str, Any]:
    Tokenizer.from_file(str(GOLDEN / "hf_bpe" / "tokenizer.json")).model.save(str(folder))
    files = {"vocab_file": str(folder / "vocab.json"), "merge_file": str(folder / "merges.txt")}
    return {"tokenizer_type": "GPT2BPETokenizer", **files, "tokenizer_special_tokens": ("<x>",)}


def _tiktoken(folder: Path, pattern: str) -> dict[str, Any]:
    """Bytes and beginnings of words; one token has the text of a special token."""
    words = sorted({word for text in LINES for word in text.split()})[::7]
    pieces = {word.encode()[:end]: None for word in words for end in range(2, 7) if len(word.encode()) >= end}
    tokens = list(dict.fromkeys([*(bytes([n]) for n in range(256)), b"<s", b"<s>", *pieces]))[: VOCABULARY - 12]
    entries = [{"rank": n, "token_bytes": base64.b64encode(token).decode()} for n, token in enumerate(tokens)]
    (folder / "vocab.json").write_text(json.dumps(entries))
    return {
        "tokenizer_type": "TikTokenizer",
        "tokenizer_model": str(folder / "vocab.json"),
        "vocab_size": len(tokens) + 12,
        "tiktoken_num_special_tokens": 12,
        "tiktoken_pattern": pattern,
        "tokenizer_special_tokens": (*DEFAULT_SPECIAL_TOKENS, "<x>"),
    }


SYMBOLS = {"user_defined_symbols": ["<x>", "\n", "<x>y"], "control_symbols": ["<pad>"]}
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "bytes": lambda _: {"tokenizer_type": "ByteTokenizer"},
    "huggingface": _huggingface,
    "huggingface, special": lambda folder: _huggingface(folder, ("<x>", "<y>")),
    "gpt2": _gpt2,
    "tiktoken v1": lambda folder: _tiktoken(folder, "v1"),
    "tiktoken v2": lambda folder: _tiktoken(folder, "v2"),
    "bpe": lambda folder: _trained(folder, "bpe"),
    "unigram": lambda folder: _trained(folder, "unigram"),
    "bpe without fallback": lambda folder: _sentencepiece(folder, model_type="bpe", add_dummy_prefix=False),
    "bpe with symbols": lambda folder: _sentencepiece(folder, model_type="bpe", byte_fallback=True, **SYMBOLS),
    "unigram with symbols": lambda folder: _sentencepiece(
        folder, model_type="unigram", add_dummy_prefix=False, remove_extra_whitespaces=False, **SYMBOLS
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that names no tokenizer."""
    folder, save = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("saved")
    write_model(folder, "Llama 3.2")
    assert convert(["from-hf", "--load", str(folder), "--save", str(save)]) == 0
    return save


def _with_tokenizer(saved: Path, folder: Path, flags: dict[str, Any]) -> str:
    """The checkpoint as a run with these flags would have saved it."""
    shutil.copytree(saved, folder)
    [checkpoint] = folder.glob("iter_*")
    shutil.rmtree(checkpoint / "tokenizer", ignore_errors=True)
    path = checkpoint / "config.yaml"
    content = yaml.safe_load(path.read_text()) | {
        name: list(value) if isinstance(value, tuple) else value for name, value in flags.items()
    }
    path.write_text(yaml.safe_dump(content))
    (checkpoint / "manifest.json").unlink()
    checkpoint_manifest.write(
        checkpoint, checkpoint_manifest.describe(checkpoint, checkpoint_manifest.all_files(checkpoint))
    )
    return str(folder)


def _built(flags: dict[str, Any]) -> Any:
    renamed = {"tokenizer_type": "type", "tokenizer_model": "model", "tokenizer_special_tokens": "special_tokens"}
    return build_tokenizer(**{renamed.get(name, name): value for name, value in flags.items() if name != "data_path"})


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_gives_the_ids_of_training(
    kind: str, saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    (tmp_path / "tokenizer").mkdir()
    flags = KINDS[kind](tmp_path / "tokenizer")
    tokenizer = _built(flags)
    documents = [[*tokenizer.encode(text), tokenizer.eod] for text in LINES]
    flags |= {"data_path": [write_documents(tmp_path / "corpus", documents)], "split": "9,1,0"}
    load, exported = _with_tokenizer(saved, tmp_path / "save", flags), tmp_path / "hf"
    assert convert(["to-hf", "--load", load, "--save", str(exported), "--no-verify"]) == 0
    count = len(LINES) - round(len(LINES) * 0.9)
    assert f"probe texts and {min(count, 64)} documents, read by tokenizers and transformers" in capsys.readouterr().out

    theirs: Any = AutoTokenizer.from_pretrained(exported)
    again = build_tokenizer("HuggingFaceTokenizer", str(exported))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert theirs(text).input_ids == ids, text
        assert again.encode(text) == ids, text
        if tokenizer.decode(ids) == text:
            assert theirs.decode(ids, skip_special_tokens=False) == text
    assert theirs.eos_token_id == again.eod == tokenizer.eod
    assert again.vocab_size == tokenizer.vocab_size
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((exported / name).read_text())
        assert (settings["eos_token_id"], settings["bos_token_id"]) == (tokenizer.eod, None)

    assert generate(["--model", str(exported), "--prompt", "word and", "--max-new-tokens", "3"]) == 0
    assert "word and" in capsys.readouterr().out
    if kind == "bpe":  # in again, and out again
        assert convert(["from-hf", "--load", str(exported), "--save", str(tmp_path / "back")]) == 0
        kept = tmp_path / "back" / "iter_0000000" / "tokenizer"
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
        assert all((kept / name).read_bytes() == (exported / name).read_bytes() for name in names)


def test_an_imported_folder_that_goes_out_again_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """transformers makes another pipeline of what names one of its own classes: the export names another class."""
    folder, save, exported = tmp_path / "hf", tmp_path / "saved", tmp_path / "again"
    write_model(folder, "Llama 3.2")
    train_bytelevel_bpe(LINES, 400, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"additional_special_tokens": ["<tool>"]}))
    assert convert(["from-hf", "--load", str(folder), "--save", str(save)]) == 0
    assert convert(["to-hf", "--load", str(save), "--save", str(exported), "--no-verify"]) == 0
    assert "tokenizer: the ids of training on 1" in capsys.readouterr().out
    _rebuilt_by_gpt2(folder)
    before = json.loads(settings.read_text())
    shutil.rmtree(save)
    shutil.rmtree(exported)
    assert convert(["from-hf", "--load", str(folder), "--save", str(save)]) == 0
    assert convert(["to-hf", "--load", str(save), "--save", str(exported), "--no-verify"]) == 0
    said = capsys.readouterr()
    assert "transformers' GPT2Tokenizer keeps only vocabulary and merges of tokenizer.json" in said.err
    assert "tokenizer: the ids of training on 1" in said.out
    after = json.loads((exported / "tokenizer_config.json").read_text())
    assert after == {**before, "tokenizer_class": "PreTrainedTokenizerFast"}


def test_a_difference_ends_the_export(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Its charsmap (nmt_nfkc) goes by grapheme clusters in the library `tokenizers`.
    flags = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(GOLDEN / "spm_unigram.model")}
    load, exported = _with_tokenizer(saved, tmp_path / "save", flags), tmp_path / "hf"
    arguments = ["to-hf", "--load", load, "--save", str(exported), "--no-verify"]
    message = (
        r"read by tokenizers, gives other ids than SentencePieceTokenizer on \d+ of \d+ texts. The shortest is '.*"
    )
    with pytest.raises(DataError, match=message + r": \[.* in training, \[.* in the export. --skip-tokenizer-check"):
        convert(arguments)
    assert not exported.exists()
    assert convert([*arguments, "--skip-tokenizer-check"]) == 0
    assert (exported / "tokenizer.json").exists()
    shutil.rmtree(exported)
    capsys.readouterr()
    assert convert([*arguments, "--no-tokenizer"]) == 0
    assert "as --no-tokenizer asks for" in capsys.readouterr().out
    assert not list(exported.glob("token*"))
    assert json.loads((exported / "generation_config.json").read_text())["eos_token_id"] == 2


def _rebuilt_by_gpt2(folder: Path) -> None:
    """Give a byte-level BPE another way to split than GPT2Tokenizer builds, and name this class."""
    made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert isinstance(made.model, models.BPE)
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    settings = folder / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "tokenizer_class": "GPT2Tokenizer"}))


def test_a_class_that_transformers_rebuilds_is_replaced_in_the_export(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A class of its own rebuilds the pipeline, here with another way to split."""
    from transformers import AutoTokenizer

    train_bytelevel_bpe(LINES, 400, tmp_path / "tokenizer")
    _rebuilt_by_gpt2(tmp_path / "tokenizer")
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "tokenizer")}
    load = _with_tokenizer(saved, tmp_path / "save", flags)
    assert convert(["to-hf", "--load", load, "--save", str(tmp_path / "hf"), "--no-verify"]) == 0
    assert 'says "tokenizer_class": "PreTrainedTokenizerFast" instead' in capsys.readouterr().err
    ours = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "tokenizer"))
    theirs: Any = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert all(theirs(text).input_ids == ours.encode(text) for text in TEXTS)


def test_a_type_of_model_that_transformers_rebuilds_always_is_refused_with_a_way_out(tmp_path: Path) -> None:
    """transformers 5.23 reads tokenizers of qwen2 with its own class, whatever their folder says."""
    from transformers import PreTrainedTokenizerFast

    folder, save, exported = (tmp_path / name for name in ("hf", "saved", "again"))
    write_model(folder, "Qwen2")
    train_bytelevel_bpe(LINES, 400, folder)
    _rebuilt_by_gpt2(folder)
    assert convert(["from-hf", "--load", str(folder), "--save", str(save)]) == 0
    words = ["to-hf", "--load", str(save), "--save", str(exported), "--no-verify"]
    with pytest.raises(DataError, match=r"takes Qwen2Tokenizer whatever .* PreTrainedTokenizerFast.from_pretrained"):
        convert(words)
    assert not exported.exists()
    assert convert([*words, "--skip-tokenizer-check"]) == 0
    ours = build_tokenizer("HuggingFaceTokenizer", str(folder))
    theirs: Any = PreTrainedTokenizerFast.from_pretrained(exported, local_files_only=True)
    assert all(theirs(text).input_ids == ours.encode(text) for text in TEXTS)


def test_numbers_are_no_text(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = _with_tokenizer(saved, tmp_path / "save", {"tokenizer_type": "NullTokenizer"})
    exported = str(tmp_path / "hf")
    assert convert(["to-hf", "--load", load, "--save", exported, "--no-verify"]) == 0
    assert "NullTokenizer has no text" in capsys.readouterr().out
    assert not list(Path(exported).glob("token*"))
    assert generate(["--model", exported, "--prompt", "5 17", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("5 17 ")
    with pytest.raises(ConfigurationError, match="--prompt def must be token ids below 1003"):
        generate(["--model", exported, "--prompt", "def"])
