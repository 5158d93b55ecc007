"""TikTokenizer and GPT2BPETokenizer give the ids of Megatron's own classes and of their libraries."""

import base64
import contextlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prepare.encode_many import fast_encoder, first_difference, plain_encoder
from megatron_ext.plugins.prepare.preprocess import EncodeJob, encode_files
from megatron_ext.tokenizer.from_flags import build_tokenizer, tokenizer_from_flags
from megatron_ext.tokenizer.probe_texts import probe_texts
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer as Protocol
from megatron_ext.train.configure import configure

GOLDEN = Path(__file__).parents[2] / "golden" / "preprocess"
TEXTS = [json.loads(line)["text"] for line in (GOLDEN / "input.jsonl").read_text().splitlines()]
SPECIAL = ["<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>"]


def merged_bytes() -> list[bytes]:
    """The bytes, and then what pairs of frequent words' pieces make: a small tiktoken vocabulary."""
    words = sorted({piece for text in TEXTS for word in text.split() for piece in (word, " " + word)})
    chooser = random.Random(3)
    pieces: dict[bytes, None] = {}
    for word in chooser.sample(words, 400):
        encoded = word.encode()[:8]
        for end in range(2, len(encoded) + 1):
            pieces[encoded[:end]] = None
    return [bytes([n]) for n in range(256)] + [piece for piece in pieces if len(piece) > 1]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, int]:
    """A tiktoken file and its number of tokens."""
    path = tmp_path_factory.mktemp("tiktoken") / "vocab.json"
    tokens = merged_bytes()
    entries = [
        {"rank": n, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for n, token in enumerate(tokens)
    ]
    path.write_text(json.dumps(entries))
    return str(path), len(tokens)


@pytest.fixture(scope="module")
def gpt2_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    Tokenizer.from_file(str(GOLDEN / "hf_bpe" / "tokenizer.json")).model.save(str(folder))
    return folder


def agree(ours: Protocol, theirs: Callable[[str], list[int]]) -> None:
    for text in [*TEXTS, *probe_texts(ours, 1200, 11)]:
        assert ours.encode(text) == theirs(text), text


@pytest.mark.parametrize("pattern", ["v1", "v2"])
@pytest.mark.parametrize(("count", "cut", "special"), [(1000, 0, None), (9, 300, [*SPECIAL, "<|im_start|>"])])
def test_tiktoken_is_megatrons(
    vocabulary: tuple[str, int], pattern: str, count: int, cut: int, special: list[str] | None
):
    from megatron.core.tokenizers.text.libraries import TikTokenTokenizer  # imports transformers

    path, tokens = vocabulary
    size = tokens - cut + count
    theirs = TikTokenTokenizer(path, special, count, pattern=pattern, vocab_size=size)
    ours = build_tokenizer(
        "TikTokenizer",
        path,
        size,
        tiktoken_pattern=pattern,
        tiktoken_num_special_tokens=count,
        special_tokens=special,
    )
    agree(ours, theirs.text_to_ids)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    assert ours.encode("<pad></s><SPECIAL_8>") == [theirs.pad_id, theirs.eos_id, 8]
    assert ours.encode("lone \ud800 surrogate") == theirs.text_to_ids("lone \ud800 surrogate")
    assert all(ours.decode(ours.encode(text)) == text for text in TEXTS)


def test_gpt2_is_megatrons(gpt2_files: Path, tmp_path: Path):
    from megatron.core.tokenizers.text.libraries import MegatronHFTokenizer

    # Megatron asks the hub for "gpt2", and a folder of this name answers first.
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text('{"model_type": "gpt2"}')
    files: dict[str, Any] = {
        "vocab_file": str(gpt2_files / "vocab.json"),
        "merges_file": str(gpt2_files / "merges.txt"),
    }
    extra = ["<extra_0>", "<extra_1>"]
    with contextlib.chdir(tmp_path):
        theirs = MegatronHFTokenizer("GPT2BPETokenizer", **files, additional_special_tokens=extra)
    ours = build_tokenizer(
        "GPT2BPETokenizer",
        vocab_file=files["vocab_file"],
        merge_file=files["merges_file"],
        special_tokens=extra,
    )
    agree(ours, theirs.text_to_ids)
    assert (ours.vocab_size, ours.eod) == (theirs.vocab_size, theirs.eod)
    assert ours.encode("a<|endoftext|><extra_1>")[-2:] == [ours.eod, ours.vocab_size - 1]
    assert all(ours.decode(ours.encode(text)) == text for text in TEXTS)


def test_the_fast_encoder_of_tiktoken(vocabulary: tuple[str, int]):
    path, tokens = vocabulary
    tokenizer = build_tokenizer("TikTokenizer", path, tokens + 50, tiktoken_num_special_tokens=50)
    fast, plain = fast_encoder(tokenizer), plain_encoder(tokenizer)
    assert first_difference(fast, plain, [*TEXTS, *probe_texts(tokenizer, 2000, 5), *every_character()]) is None
    other = build_tokenizer("TikTokenizer", path, tokens + 1000, tiktoken_pattern="v1")
    with pytest.raises(ValueError, match="it cannot split as --tiktoken-pattern v1"):
        fast_encoder(other)


def every_character() -> list[str]:
    """Each of the characters that two Unicode tables may class differently, between others of all kinds."""
    points = (*range(0x3400), *range(0xA000, 0xAC00), *range(0xF900, 0x20000), *range(0x2A6D0, 0x323B0, 7))
    forms = ["aB{0}!{0}1{0} {0}Ab/\n{0}".format(chr(point)) for point in points]
    return ["".join(forms[first : first + 32]) for first in range(0, len(forms), 32)]


def test_the_fast_encoder_of_gpt2(gpt2_files: Path):
    files: dict[str, Any] = {"vocab_file": str(gpt2_files / "vocab.json"), "merge_file": str(gpt2_files / "merges.txt")}
    tokenizer = build_tokenizer("GPT2BPETokenizer", **files, special_tokens=["<extra_0>"])
    texts = [*TEXTS, *probe_texts(tokenizer, 1000, 5), "a<extra_0>b"]
    assert first_difference(fast_encoder(tokenizer), plain_encoder(tokenizer), texts) is None


@pytest.mark.parametrize("type", ["TikTokenizer", "GPT2BPETokenizer"])
def test_preprocessing(tmp_path: Path, vocabulary: tuple[str, int], gpt2_files: Path, type: str):
    path, tokens = vocabulary
    flags = {
        "TikTokenizer": {"tokenizer_model": path, "vocab_size": tokens + 7, "tiktoken_num_special_tokens": 7},
        "GPT2BPETokenizer": {
            "vocab_file": str(gpt2_files / "vocab.json"),
            "merge_file": str(gpt2_files / "merges.txt"),
        },
    }[type]
    notes: list[str] = []
    job = EncodeJob((str(GOLDEN / "input.jsonl"),), str(tmp_path / "out"), type, **flags, append_eod=True, workers=2)
    encode_files(job, note=notes.append)
    assert notes[0].startswith("fast tokenizer: equal on")
    tokenizer = build_tokenizer(type, flags.pop("tokenizer_model", None), **flags)
    encoded = [tokenizer.encode(text) for text in TEXTS]
    expected = [token for ids in encoded if ids for token in (*ids, tokenizer.eod)]
    assert np.fromfile(tmp_path / "out_text_document.bin", np.uint16).tolist() == expected
    assert json.loads((tmp_path / "out_manifest.json").read_text())["tokenizer"]["type"] == type


def test_flags_and_files_make_the_identity_of_a_tokenizer(vocabulary: tuple[str, int], gpt2_files: Path):
    path, tokens = vocabulary
    files: dict[str, Any] = {"vocab_file": str(gpt2_files / "vocab.json"), "merge_file": str(gpt2_files / "merges.txt")}
    built = [
        build_tokenizer("TikTokenizer", path, tokens + 1000),
        build_tokenizer("TikTokenizer", path, tokens + 999),
        build_tokenizer("TikTokenizer", path, tokens + 1000, tiktoken_pattern="v1"),
        build_tokenizer("TikTokenizer", path, tokens, tiktoken_num_special_tokens=8),
        build_tokenizer("TikTokenizer", path, tokens, tiktoken_num_special_tokens=9),
        build_tokenizer("TikTokenizer", path, tokens + 1000, special_tokens=[*SPECIAL, "<x>"]),
        build_tokenizer("GPT2BPETokenizer", **files),
        build_tokenizer("GPT2BPETokenizer", **files, special_tokens=["<x>"]),
    ]
    assert len({json.dumps(tokenizer.identity()) for tokenizer in built}) == len(built)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"type": "GPT2BPETokenizer", "vocab_file": "M", "merge_file": "V"}, "are not the vocab.json and merges.txt"),
        ({"type": "ByteTokenizer", "special_tokens": ["<x>"]}, "--tokenizer-special-tokens <x> is not read by"),
        ({"type": "ByteTokenizer", "tiktoken_pattern": "v1"}, "only by TikTokenizer; leave --tiktoken-pattern out"),
        ({"type": "TikTokenizer"}, "needs --tokenizer-model, a tiktoken vocabulary in JSON"),
        ({"type": "TikTokenizer", "model": "V"}, "is not a tiktoken vocabulary in JSON"),
        ({"type": "TikTokenizer", "model": "M"}, "is not a tiktoken vocabulary in JSON"),
        (
            {"type": "TikTokenizer", "model": "T", "special_tokens": ["<s>"]},
            "lacks <unk> </s> <mask> <pad> <cls> <sep>",
        ),
        ({"type": "TikTokenizer", "model": "T", "tiktoken_num_special_tokens": 6}, "6 is less than the 7 special"),
        ({"type": "TikTokenizer", "model": "T", "special_tokens": [*SPECIAL, "<s>"]}, "<s> is there twice"),
    ],
)
def test_files_and_flags_that_do_not_fit_are_refused(
    vocabulary: tuple[str, int], gpt2_files: Path, flags: dict[str, Any], message: str
):
    names = {"V": str(gpt2_files / "vocab.json"), "M": str(gpt2_files / "merges.txt"), "T": vocabulary[0]}
    given: dict[str, Any] = {
        key: names.get(value, value) if isinstance(value, str) else value for key, value in flags.items()
    }
    with pytest.raises(ConfigurationError) as caught:
        build_tokenizer(**given)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries.reverse(), "entry 0 is out of place"),
        (lambda entries: entries[5].update(token_bytes="AA=="), "entry 5 is out of place"),
        (lambda entries: entries[300].update(token_bytes=entries[301]["token_bytes"]), "a token is there twice"),
        (lambda entries: entries[300].update(token_bytes="?"), "is not a tiktoken vocabulary"),
        (lambda entries: entries[300].pop("rank"), "is not a tiktoken vocabulary"),
        # It counts from 0 and begins with the bytes.
        (lambda entries: entries[300].update(rank=0), "entry 300 is out of place"),
        (lambda entries: entries[300].update(rank=301), "entry 300 is out of place"),
        (lambda entries: entries[255].update(token_bytes="YWI="), "entry 255 is out of place"),
        (lambda entries: entries.__delitem__(slice(200, None)), "entry 200 is out of place"),
    ],
)
def test_a_damaged_tiktoken_file(tmp_path: Path, vocabulary: tuple[str, int], change: Callable, message: str):
    entries = json.loads(Path(vocabulary[0]).read_text())
    change(entries)
    (tmp_path / "vocab.json").write_text(json.dumps(entries))
    with pytest.raises(ConfigurationError, match=message):
        build_tokenizer("TikTokenizer", str(tmp_path / "vocab.json"), vocabulary[1] + 1000)


def test_a_runs_flags_make_its_tokenizer(vocabulary: tuple[str, int], gpt2_files: Path):
    base = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --lr 1e-3 "
    base += "--train-iters 5 --mock-data --device cpu --dry-run "
    config = configure(
        f"{base} --tokenizer-type TikTokenizer --tokenizer-model {vocabulary[0]} --vocab-size {vocabulary[1] + 9} "
        f"--tiktoken-num-special-tokens 9 --tiktoken-special-tokens {' '.join(SPECIAL)} <x>".split()
    ).config
    assert config.data.vocab_size == vocabulary[1] + 9
    assert tokenizer_from_flags(config.data).encode("<x>") == [7]
    gpt2 = f"--tokenizer-type GPT2BPETokenizer --vocab-file {gpt2_files}/vocab.json --merge-file"
    assert configure(f"{base} {gpt2} {gpt2_files}/merges.txt".split()).config.data.vocab_size == 1200
    with pytest.raises(ConfigurationError, match="--merge-file none cannot be read"):
        configure(f"{base} {gpt2} none".split())


@pytest.mark.parametrize(("special", "cut", "taken"), [(10, 0, True), (10, 1, True), (10, -1, False), (7, 0, True)])
def test_the_sizes_that_a_tiktoken_file_allows(vocabulary: tuple[str, int], special: int, cut: int, taken: bool):
    """As many special tokens as there are named ones at least, and as many others as the file has at most."""
    path, tokens = vocabulary
    size = tokens + special - cut
    if not taken:
        with pytest.raises(ConfigurationError, match=f"less than --vocab-size {size}; use --vocab-size {size - 1}$"):
            build_tokenizer("TikTokenizer", path, size, tiktoken_num_special_tokens=special)
        return
    tokenizer: Any = build_tokenizer("TikTokenizer", path, size, tiktoken_num_special_tokens=special)
    assert tokenizer.vocab_size == size
    assert list(tokenizer.special_tokens.items()) == [
        (text, number)
        for number, text in enumerate([*SPECIAL, *(f"<SPECIAL_{number}>" for number in range(7, special))])
    ]
    assert sorted(tokenizer.ranks.values()) == list(range(special, size))
    assert tokenizer.eod == 2
    assert tokenizer.splits_between_words()
    spaced: Any = build_tokenizer("TikTokenizer", path, tokens, special_tokens=[*SPECIAL, "<a b>"])
    assert not spaced.splits_between_words()


@pytest.mark.parametrize(("size", "taken"), [(9, False), (10, False), (11, True)])
def test_special_tokens_leave_room_for_others(vocabulary: tuple[str, int], size: int, taken: bool):
    if taken:
        assert build_tokenizer("TikTokenizer", vocabulary[0], size, tiktoken_num_special_tokens=10).vocab_size == 11
        return
    with pytest.raises(
        ConfigurationError, match=f"--vocab-size {size} leaves no room behind --tiktoken-num-special-to"
    ):
        build_tokenizer("TikTokenizer", vocabulary[0], size, tiktoken_num_special_tokens=10)
