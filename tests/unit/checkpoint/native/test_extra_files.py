"""The tokenizer's files that lie in a checkpoint."""

from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.native import extra_files
from megatron_ext.config.schema import DataConfig


def _fill(path: Path, *names: str) -> None:
    path.mkdir(parents=True)
    for name in names:
        (path / name).touch()


def test_files_of_every_kind_of_tokenizer(tmp_path: Path) -> None:
    """What is kept in a checkpoint is found there by the flag that named it."""
    flags = {"tokenizer_model": "model", "vocab_file": "vocab", "merge_file": "merges"}
    names = {
        "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
        "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
        "TikTokenizer": {"tokenizer_model": "tiktoken.json"},
        "HuggingFaceTokenizer": {"tokenizer_model": ""},
        "NullTokenizer": {},
        None: {},
    }
    for kind, kept in names.items():
        checkpoint = tmp_path / f"of {kind}"
        given: dict[str, Any] = {flag: str(tmp_path / name) for flag, name in flags.items()}
        if kind == "HuggingFaceTokenizer":
            given["tokenizer_model"] = str(checkpoint / "tokenizer")
            expected = {"tokenizer.json": checkpoint / "tokenizer" / "tokenizer.json"}
        else:
            expected = {name: tmp_path / flags[flag] for flag, name in kept.items()}
        assert extra_files.tokenizer_files(DataConfig(tokenizer_type=kind, **given)) == expected
        assert extra_files.kept_tokenizer({"tokenizer_type": kind}, checkpoint) == {}
        _fill(
            checkpoint / "tokenizer", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.json"
        )
        assert extra_files.kept_tokenizer({"tokenizer_type": kind}, checkpoint) == {
            flag: str(checkpoint / "tokenizer" / name) for flag, name in kept.items()
        }
