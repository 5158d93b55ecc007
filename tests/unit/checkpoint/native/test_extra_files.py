"""The tokenizer's files that lie in a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native import checkpoint_manifest, extra_files
from megatron_ext.config.schema import DataConfig
from megatron_ext.train.pretrain import pretrain
from tests.support.small_runs import MODEL


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


def test_a_checkpoint_of_other_versions_is_told_of_in_one_line(tmp_path: Path) -> None:
    extra_files.write_versions(tmp_path)
    assert extra_files.other_versions(tmp_path) is None
    path = tmp_path / extra_files.VERSIONS
    written = json.loads(path.read_text())
    path.write_text(
        json.dumps({**written, "megatron_ext": "0.1.0", "torch": "2.11.0", "numpy": "1.0", "python": "3.9"})
    )
    said = extra_files.other_versions(tmp_path)
    assert said == (
        f"{tmp_path} was written with megatron_ext 0.1.0 (here {written['megatron_ext']}), torch 2.11.0 (here "
        f"{written['torch']}): CHANGELOG.md of this program says what has changed; torch's kernels may round "
        "otherwise, so that losses agree but for rounding"
    )
    for text in ("", "[]", '{"torch": 2}', "{" * 100_000, '{"torch": "' + "9" * 300 + '"}'):
        path.write_text(text)
        assert extra_files.other_versions(tmp_path) is None, "a stranger's file says nothing"
    path.unlink()
    assert extra_files.other_versions(tmp_path) is None


def test_a_resumed_run_tells_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, "--eval-iters", "0", "--save", str(tmp_path), "--load", str(tmp_path)]
    pretrain(flags)
    path = tmp_path / "iter_0000003" / extra_files.VERSIONS
    changed = json.dumps({**json.loads(path.read_text()), "megatron-core": "0.18.1"})
    path.write_text(changed)
    others = [file for file in checkpoint_manifest.all_files(path.parent) if file.name != checkpoint_manifest.MANIFEST]
    checkpoint_manifest.write(path.parent, checkpoint_manifest.describe(path.parent, others))
    capsys.readouterr()
    pretrain([*flags, "--train-iters", "4", "--override-opt-param-scheduler"])
    warned = [line for line in capsys.readouterr().err.splitlines() if "was written with" in line]
    assert len(warned) == 1
    assert "megatron-core 0.18.1 (here " in warned[0]
    assert warned[0].endswith("megatron-core's schedules and optimizers may round otherwise")
