"""Snapshots of a real run of one process: what they hold, what goes on from them, which of them stay."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import checkpoint_manifest
from megatron_ext.checkpoint.native.checkpoint_folder import iteration_folder
from megatron_ext.checkpoint.native.save import save_checkpoint
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.errors import DataError
from megatron_ext.plugins.snapshots import rank_file, snapshot_folder, writer
from megatron_ext.plugins.snapshots.writer import SnapshotWriter, restore_snapshot
from tests.support.checkpoints import FLAGS, train, trained_alone
from tests.support.run_state import state_hash


def flags(tmp_path: Path, more: str = "") -> list[str]:
    return [*FLAGS, *more.split(), "--save", f"{tmp_path}/save", "--non-persistent-local-ckpt-dir", f"{tmp_path}/local"]


def snapshot_of(run: Any) -> SnapshotWriter:
    """Take a snapshot, and wait until it is written."""
    made = SnapshotWriter(run)
    assert made.take() > 0.0
    made.join()
    assert made.problem is None
    return made


@pytest.mark.parametrize(
    "more",
    [
        "--hidden-dropout 0.1 --attention-dropout 0.1",
        "--bf16 --use-distributed-optimizer",
        "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1",
        "--optimizer sgd",
    ],
)
def test_another_process_goes_on_from_a_snapshot_bit_for_bit(more: str, tmp_path: Path) -> None:
    """The training goes on while the snapshot is written, and is not in it."""
    run = trained_alone(flags(tmp_path, more), 2)
    made = SnapshotWriter(run)
    made.take()
    then = state_hash(run)
    losses = train(run, 3)
    made.join()
    assert made.bytes == snapshot_folder.file_of(made.folder, 2, 0).stat().st_size
    assert state_hash(run) != then
    again = trained_alone(flags(tmp_path, more), 1)
    restore_snapshot(again, 2)
    assert again.state.iteration == 2
    assert state_hash(again) == then
    assert train(again, 3) == losses


def test_the_header_names_the_checkpoint_that_the_snapshot_follows_on(tmp_path: Path) -> None:
    """The newest up to its own iteration: later ones are of another course of the run."""
    run = trained_alone(flags(tmp_path), 1)
    run.data_record = {"seed": 7}
    made = SnapshotWriter(run)
    found = []
    for iteration in (1, 2, 4, 5, 3):
        run.state.iteration = iteration
        made.take()
        made.join()
        header = rank_file.read_header(snapshot_folder.file_of(made.folder, iteration, 0)) or {}
        found.append((header["checkpoint"], header["manifest"]))
        assert (header["iteration"], header["layout"]) == (iteration, snapshot_folder.layout_of(run.config))
        assert header["config.yaml"] == to_yaml(run.config)
        assert json.loads(header["data.json"]) == {"seed": 7}
        if iteration in (2, 4):
            save_checkpoint(run, tmp_path / "save")
    names = {step: checkpoint_manifest.name_of(iteration_folder(tmp_path / "save", step)) for step in (2, 4)}
    assert None not in names.values()
    assert found == [(0, None), (0, None), (2, names[2]), (4, names[4]), (2, names[2])]


def test_the_newest_two_snapshots_stay_until_the_run_is_saved(tmp_path: Path) -> None:
    run = trained_alone(flags(tmp_path))
    made = SnapshotWriter(run)
    for iteration in (2, 4, 6):
        run.state.iteration = iteration
        made.take()
        made.join()
    assert snapshot_folder.iterations(made.folder) == [4, 6]
    run.state.iteration = 5
    made.remove_later()
    assert snapshot_folder.iterations(made.folder) == [4]
    made.forget()
    assert not made.folder.exists()


def test_a_snapshot_that_cannot_be_written_is_told_and_leaves_the_older_ones(tmp_path: Path) -> None:
    """The training goes on; this rank takes none any more."""
    run = trained_alone(flags(tmp_path), 1)
    made = snapshot_of(run)
    run.state.iteration = 2
    made.take()
    made.join()
    place = iteration_folder(made.folder, 3)
    place.write_text("a file in the way")
    run.state.iteration = 3
    made.take()
    made.join()
    assert made.problem == f"File exists: {place}"
    assert snapshot_folder.iterations(made.folder) == [1, 2, 3]
    run.state.iteration = 4
    assert made.take() == 0.0
    assert snapshot_folder.iterations(made.folder) == [1, 2, 3]


@pytest.mark.parametrize("lacks", [0, 1])
def test_room_for_exactly_a_snapshot_is_enough(lacks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trained_alone(flags(tmp_path), 1)
    tensors = writer.tensors_of(run) | writer.random_states(run)
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=needed - lacks))
    made = SnapshotWriter(run)
    made.take()
    made.join()
    if not lacks:
        assert made.problem is None
        return
    place = iteration_folder(made.folder, 1)
    assert made.problem == f"{needed:,} bytes are needed for a rank, {needed - 1:,} are free: {place}"
    assert list(place.iterdir()) == []


def test_a_snapshot_of_another_run_is_refused_with_a_way_out(tmp_path: Path) -> None:
    run = trained_alone(flags(tmp_path), 1)
    made = snapshot_of(run)
    path = snapshot_folder.file_of(made.folder, 1, 0)
    rank_file.write(path, {}, writer.tensors_of(run) | writer.random_states(run))
    with pytest.raises(DataError, match=r"lacks 'numbers'; remove the folder to go on from the checkpoint$"):
        restore_snapshot(run, 1)
    other = trained_alone(flags(tmp_path, "--hidden-size 48"))
    with pytest.raises(DataError, match="is of another run"):
        restore_snapshot(other, 1)


def test_each_byte_of_a_run_is_copied_once(tmp_path: Path) -> None:
    """A tensor inside another is left out; one that shares a part, or lies between another's elements, is not."""
    run = trained_alone(flags(tmp_path))
    whole, parts, strided = torch.arange(8.0), torch.arange(8.0), torch.arange(8.0)
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    buffers = {
        "inside": whole[2:4],
        "bytes": whole.view(torch.uint8)[:16],  # more elements than the whole has, and fewer bytes
        "whole": whole,
        "first": parts[:6],
        "second": parts[4:],
        "even": strided[::2],
        "between": strided[1:3],
        "empty": torch.empty(0),
        "freed": freed,
    }
    for name, tensor in buffers.items():
        run.chunks[0].register_buffer(name, tensor)
    found = writer.tensors_of(run)
    own = [name.removeprefix("buffers.0.") for name in found if name.rpartition(".")[2] in buffers]
    assert own == ["whole", "first", "second", "even", "between"]
    storages = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
    assert all(weight.untyped_storage().data_ptr() in storages for weight in run.chunks[0].parameters())
    assert not any(tensor.requires_grad for tensor in found.values())


def test_snapshots_lie_in_a_folder_of_their_save_folder(tmp_path: Path) -> None:
    """Two runs of a machine do not mix; a link to a save folder is that folder."""
    (tmp_path / "save").mkdir()
    (tmp_path / "link").symlink_to("save")
    found = []
    for save in ("save", "link", "other"):
        run = trained_alone([*flags(tmp_path), "--save", str(tmp_path / save)])
        found.append(snapshot_folder.folder_of(run.config))
    assert found[0] == found[1] != found[2]
    shutil.rmtree(tmp_path / "save")
    assert snapshot_folder.folder_of(trained_alone(FLAGS).config) is None
