import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prepare.commands import train_tokenizer
from megatron_ext.plugins.prepare.tokenizer_training import sample_texts, train_bytelevel_bpe, train_sentencepiece
from megatron_ext.tokenizer.from_flags import build_tokenizer

TOOLS = Path(__file__).parents[3] / "tools"
INPUT = str(Path(__file__).parents[2] / "golden" / "preprocess" / "input.jsonl")
TEXT = "def first(citizen):\n    return  citizen  # ☂\n"


@pytest.fixture
def train() -> Callable[[list[str]], int]:
    return train_tokenizer.main


def test_bytelevel_bpe(tmp_path: Path, train: Callable[[list[str]], int]):
    for name in ("a", "b"):
        assert train(["--input", INPUT, "--output-dir", str(tmp_path / name), "--vocab-size", "600"]) == 0
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "a"))
    assert (tokenizer.vocab_size, tokenizer.eod) == (600, 0)
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("<|endoftext|>") == [0]
    assert tokenizer.identity() == build_tokenizer("HuggingFaceTokenizer", str(tmp_path / "b")).identity()


def test_a_pipe_in_the_place_of_what_is_written_is_replaced(tmp_path: Path, train: Callable[[list[str]], int]):
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model"):
        os.mkfifo(tmp_path / name)
    arguments = ["--input", INPUT, "--output-dir", str(tmp_path), "--vocab-size"]
    assert train([*arguments, "600"]) == train([*arguments, "900", "--type", "sentencepiece-bpe"]) == 0
    assert all(path.is_file() for path in tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece(tmp_path: Path, train: Callable[[list[str]], int], kind: str):
    arguments = ["--input", INPUT, "--vocab-size", "900", "--type", f"sentencepiece-{kind}"]
    for name in ("a", "b"):
        assert train([*arguments, "--output-dir", str(tmp_path / name)]) == 0
    models = [(tmp_path / name / "tokenizer.model").read_bytes() for name in ("a", "b")]
    assert models[0] == models[1]
    tokenizer = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "a" / "tokenizer.model"))
    assert tokenizer.vocab_size == 900
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_a_tokenizer_is_trained_on_the_keys_and_the_share_that_are_named(
    tmp_path: Path, train: Callable[[list[str]], int]
):
    rows = [{"text": f"the first word {number}", "body": f"another body {number * 7}"} for number in range(200)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def trained(name: str, *flags: str) -> str:
        line = ["--input", str(tmp_path / "in.jsonl"), "--output-dir", str(tmp_path / name), "--vocab-size", "270"]
        assert train([*line, *flags]) == 0
        return (tmp_path / name / "tokenizer.json").read_text()

    whole = trained("whole")
    assert trained("body", "--json-keys", "body") not in (whole, trained("both", "--json-keys", "text", "body"))
    assert trained("enough", "--max-bytes", "1000000") == whole
    assert trained("a part", "--max-bytes", "200") != whole


@pytest.mark.parametrize(
    ("size", "message"), [("256", "--vocab-size 256 must be over 256"), ("99999", "the text has merges for")]
)
def test_vocabularies_that_cannot_be(tmp_path: Path, train: Callable[[list[str]], int], size: str, message: str):
    with pytest.raises(ConfigurationError, match=message):
        train(["--input", INPUT, "--output-dir", str(tmp_path), "--vocab-size", size])
    assert not list(tmp_path.iterdir())


def test_a_text_with_few_merges_has_a_tokenizer_of_fewer_entries(
    tmp_path: Path, train: Callable[[list[str]], int]
) -> None:
    (tmp_path / "in.txt").write_text("one line, again and again\n" * 50)
    words = ["--input", str(tmp_path / "in.txt"), "--output-dir", str(tmp_path / "made"), "--vocab-size", "1024"]
    with pytest.raises(ConfigurationError, match=r"the text has merges for \d+ entries") as caught:
        train(words)
    assert train([*words, "--or-fewer"]) == 0
    made = json.loads((tmp_path / "made/tokenizer.json").read_text())
    assert str(caught.value).endswith(f"; use {len(made['model']['vocab'])}")


def test_a_sample_is_the_same_every_time_and_about_as_large_as_asked():
    texts = [f"text {i}" for i in range(10_000)]
    chosen = list(sample_texts(texts, 0.25))
    assert chosen == list(sample_texts(texts, 0.25))
    assert abs(len(chosen) - 2500) < 250
    assert set(sample_texts(texts, 0.1)) < set(chosen)


def test_python_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    library = tmp_path / "lib"
    for path in (
        "b.py",
        "a/z.py",
        "a.py",
        "site-packages/x.py",
        "a/__pycache__/y.py",
        *(f"m{i}.py" for i in range(99)),
    ):
        (library / path).parent.mkdir(parents=True, exist_ok=True)
        (library / path).write_text(f"# {path} é")
    (library / "latin.py").write_bytes(b"# \xe9")
    tool = runpy.run_path(str(TOOLS / "python_corpus.py"))
    monkeypatch.setattr(sys.modules["sysconfig"], "get_paths", lambda: {"stdlib": str(library)})
    assert tool["main"](["--output-prefix", str(tmp_path / "out" / "python"), "--validation-share", "0.2"]) == 0
    rows = {
        split: [json.loads(line) for line in (tmp_path / "out" / f"python_{split}.jsonl").read_text().splitlines()]
        for split in ("train", "valid")
    }
    paths = {split: [row["path"] for row in split_rows] for split, split_rows in rows.items()}
    assert sorted(paths["train"] + paths["valid"]) == sorted(
        ["b.py", "a/z.py", "a.py", *(f"m{i}.py" for i in range(99))]
    )
    assert paths["train"] == sorted(paths["train"])
    assert 10 <= len(paths["valid"]) <= 30
    assert all(row["text"] == f"# {row['path']} é" for split_rows in rows.values() for row in split_rows)


def test_a_corpus_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Files of one pattern, without the comment that each begins with; the package's own code does not run."""
    for path, text in {
        "models/a/modeling_a.py": "# Copyright\n#\n\n# Licence\nimport torch  # kept\n# kept\n",
        "models/b/modeling_b.py": '"""No comment."""\n',
        "models/b/other.py": "no",
        "__init__.py": "raise SystemError",
    }.items():
        (tmp_path / "some_package" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "some_package" / path).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    tool = runpy.run_path(str(TOOLS / "python_corpus.py"))
    flags = ["--output-prefix", str(tmp_path / "c"), "--files", "models/*/modeling_*.py", "--without-header"]
    assert tool["main"]([*flags, "--package", "some_package"]) == 0
    lines = [line for split in ("train", "valid") for line in (tmp_path / f"c_{split}.jsonl").read_text().splitlines()]
    assert {row["path"]: row["text"] for row in map(json.loads, lines)} == {
        "models/a/modeling_a.py": "import torch  # kept\n# kept\n",
        "models/b/modeling_b.py": '"""No comment."""\n',
    }
    for name in ("no_such_package", "json.tool", "this"):
        with pytest.raises(ConfigurationError, match=f"--package {name} is not installed"):
            tool["main"]([*flags, "--package", name])


@pytest.mark.parametrize(("size", "taken"), [(256, False), (257, True), (259, True), (260, False)])
def test_the_smallest_and_the_largest_vocabulary_of_a_text(tmp_path: Path, size: int, taken: bool):
    """257 entries are the bytes and the end of a document; `ab ab` has two merges, and no third."""
    if not taken:
        with pytest.raises(ConfigurationError, match=r"must be over 256|the text has merges for 259 entries; use 259$"):
            train_bytelevel_bpe(["ab ab"] * 3, size, tmp_path / "new" / "folder")
        assert list(tmp_path.iterdir()) == []
        return
    train_bytelevel_bpe(["ab ab"] * 3, size, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    tokenizer = build_tokenizer("HuggingFaceTokenizer", str(folder))
    assert (tokenizer.vocab_size, tokenizer.eod) == (size, 0)
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": 10**30,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_sentencepiece_takes_a_text_as_it_is(tmp_path: Path, kind: str):
    """Spaces and characters stay, digits are apart, and what is unknown is bytes."""
    texts = [json.loads(line)["text"] for line in Path(INPUT).read_text().splitlines()]
    train_sentencepiece([*texts, "2024 2024 2024 ﬁ\n"] * 2, 700, tmp_path, kind)
    tokenizer: Any = build_tokenizer("SentencePieceTokenizer", str(tmp_path / "tokenizer.model"))
    for text in ("a  b   c", "ﬁ", "Å²", "\u2603 \U0001f600", "x\t\ty"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = [tokenizer.piece(token) for token in tokenizer.encode("2024")]
    assert pieces[-4:] == ["2", "0", "2", "4"]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, []), (1.0, ["a", "b", "\ud800"]), (0.4, ["\ud800"]), (0.5, ["b", "\ud800"])]
)
def test_a_share_is_of_the_hashes(share: float, expected: list[str]):
    """CRC-32 of "a" is 0xe8b7be43, of "b" 0x71beeff9, and of "?", which a lone surrogate is here, 0x6464c2b0."""
    assert list(sample_texts(["a", "b", "\ud800"], share)) == expected
