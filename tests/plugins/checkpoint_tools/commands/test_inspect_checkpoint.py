"""tools/inspect_checkpoint.py: what each command prints, and the exit code."""

import os
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.checkpoint_tools.commands import inspect_checkpoint


def _saved(folder: Path, iteration: int, *, listed: bool = True) -> Path:
    path = folder / f"iter_{iteration:07d}"
    path.mkdir(parents=True)
    for name, size in ((".metadata", 1_500_000), ("metadata.json", 500_000)):
        (path / name).write_bytes(bytes(size))
        os.utime(path / name, (86_400, 86_400))
    (path / "tokenizer").mkdir()
    (path / "tokenizer" / "tokenizer.json").write_text("{}")
    if listed:
        checkpoint_manifest.write(path, checkpoint_manifest.describe(path, checkpoint_manifest.all_files(path)))
    return path


def test_checkpoints_of_a_folder_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that the tracker names has the star, and need not be the newest; folders inside are no files."""
    for iteration in (5, 7):
        _saved(tmp_path, iteration, listed=iteration == 7)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert inspect_checkpoint.main(["ls", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("* iter_0000005       0.002 GB      2 files  1970-01-0")
    assert first.endswith("  no manifest")
    assert second.startswith("  iter_0000007       0.002 GB      3 files  1970-01-0")
    assert second.endswith("  manifest")
    with pytest.raises(ConfigurationError, match="holds no checkpoint; name a folder that --save wrote"):
        inspect_checkpoint.main(["ls", str(tmp_path / "iter_0000005" / "tokenizer")])


def _with_tensors(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint of these tensors alone, after five iterations and four updates."""
    save(tensors, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist", "common_backend": "torch"}')
    torch.save({"train_state": {"iteration": 5}, "optimizer_step": 4}, folder / "common.pt")
    return folder


def test_norms_of_16_bits_are_shown_to_all_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The sum of 10,001 squares has no place in 16 bits."""
    path = _with_tensors(tmp_path / "saved", {"a.weight": torch.ones(73, 137, dtype=torch.bfloat16)})
    assert inspect_checkpoint.main(["show", str(path)]) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["iteration", "5"],
        ["adam_updates", "4"],
        ["a.weight", "bfloat16", "73", "x", "137", "norm", "1.000050e+02"],
    ]


def test_a_checkpoint_is_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _saved(tmp_path, 7)
    assert inspect_checkpoint.main(["verify", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"{path}: 3 files are as they were written (0.002 GB, ")
    (path / "tokenizer" / "tokenizer.json").write_text("[]")
    with pytest.raises(DataError, match=r"is damaged: tokenizer/tokenizer\.json has another checksum"):
        inspect_checkpoint.main(["verify", str(path)])
    checkpoint_manifest.write(path, {})
    assert inspect_checkpoint.main(["verify", str(path)]) == 0, "a manifest of no file names nothing that is wrong"
    (path / "manifest.json").unlink()
    with pytest.raises(DataError, match="has no manifest: whether it is damaged cannot be told"):
        inspect_checkpoint.main(["verify", str(path)])


def test_checkpoints_that_differ_end_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = {"a": torch.ones(3), "b": torch.zeros(2)}
    first, same, other = (
        str(_with_tensors(tmp_path / name, tensors))
        for name, tensors in (("first", both), ("same", both), ("other", {"a": torch.ones(3)}))
    )
    assert inspect_checkpoint.main(["diff", first, same]) == 0
    assert capsys.readouterr().out == "identical: 2 tensors\n"
    assert inspect_checkpoint.main(["diff", first, other]) == 1
    assert capsys.readouterr().out == f"b: only in {first}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["diff", "a"], "diff takes 2 paths, not 1"),
        (["ls", "a", "b"], "ls takes 1 path, not 2"),
        (["show", "a", "b"], "show takes 1 path, not 2"),
        (["verify", "a", "b"], "verify takes 1 path, not 2"),
    ],
)
def test_another_number_of_paths_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{said}$"):
        inspect_checkpoint.main(words)
