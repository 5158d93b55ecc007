"""Which snapshot a run of one process goes on from, and what it says of those that it does not use."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext import device
from megatron_ext.checkpoint.native import checkpoint_manifest, lock
from megatron_ext.checkpoint.native.checkpoint_folder import SavedCheckpoint, iteration_folder
from megatron_ext.checkpoint.native.resume import Resume, Search
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.config.parse.options import options
from megatron_ext.config.schema import Config
from megatron_ext.parallel import groups
from megatron_ext.plugins.snapshots import rank_file
from megatron_ext.plugins.snapshots.newest_snapshot import newest_snapshot
from megatron_ext.plugins.snapshots.snapshot_folder import file_of, folder_of, layout_of
from tests.support.small_models import small_config


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone, which holds the lock of its save folder."""
    groups.initialize(small_config().layout, device.current())
    lock.hold_until_exit(tmp_path / "save")
    yield
    lock.give_up(tmp_path / "save")


def config_of(tmp_path: Path, **checkpoint: Any) -> Config:
    """Return a configuration that goes on from where it saves, which --save names in another way than --load."""
    given = {"save": str(tmp_path / "save"), "load": f"{tmp_path}/local/../save/"}
    (tmp_path / "local").mkdir(exist_ok=True)
    config = small_config()
    flags = {**given, "non_persistent_local_ckpt_dir": str(tmp_path / "local"), **checkpoint}
    return dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **flags))


def whole_header(config: Config, save: Path) -> dict[str, Any]:
    """Return the header of a snapshot that follows on checkpoint 9."""
    return {
        "iteration": 12,
        "layout": layout_of(config),
        "checkpoint": 9,
        "contents": lock.name_of_contents(save),
        "manifest": checkpoint_manifest.name_of(iteration_folder(save, 9)),
        "config.yaml": to_yaml(config),
        "data.json": '{"seed": 7}',
        "numbers": {},
    }


def snapshot(config: Config, header: dict[str, Any], iteration: int = 12) -> Path:
    at = folder_of(config)
    assert at is not None
    path = file_of(at, iteration, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    rank_file.write(path, header, {"w": torch.ones(3)})
    return path


def checkpoint_9(save: Path, content: str = "of this run") -> None:
    at = iteration_folder(save, 9)
    at.mkdir(exist_ok=True)
    (at / "config.yaml").write_text(content)
    checkpoint_manifest.write(at, checkpoint_manifest.describe(at, checkpoint_manifest.all_files(at)))


def search(tmp_path: Path, newest: int = 9) -> Search:
    return Search(str(tmp_path / "save"), (SavedCheckpoint(iteration_folder(tmp_path / "save", newest), newest),))


def test_the_newest_whole_snapshot_gives_flags_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the newest is damaged, the one before it; a copy from another machine takes a bad file's place."""
    config = config_of(tmp_path)
    checkpoint_9(tmp_path / "save")
    header = whole_header(config, tmp_path / "save")
    paths = {step: snapshot(config, header, step) for step in (8, 10, 11, 12)}
    for step in (11, 12):
        content = paths[step].read_bytes()
        if step == 11:
            paths[step].with_name("rank_00000.copy").write_bytes(content)
        paths[step].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    found = newest_snapshot(config, search(tmp_path))
    assert isinstance(found, Resume)
    assert (found.path, found.iteration, found.is_snapshot) == (paths[11].parent, 11, True)
    assert found.saved is not None
    assert found.saved["num_layers"] == 4
    assert (found.path / "data.json").read_text() == '{"seed": 7}'
    assert rank_file.is_intact(paths[11])
    assert "the snapshot of iteration 12 in " in (said := capsys.readouterr().err)
    assert f"{paths[12]} is damaged" in said
    assert newest_snapshot(config, search(tmp_path, 12)) is None, "the checkpoint is as new"
    assert newest_snapshot(config, Search(str(tmp_path / "save"))) is None, "there is no checkpoint that it follows on"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": None}, "it has a file that is not whole"),
        ({"layout": 3}, "it has a file that is not whole"),
        ({"checkpoint": True}, "it has a file that is not whole"),
        ({"checkpoint": None}, "it has a file that is not whole"),
        (
            {"checkpoint": 11},
            "it follows on the checkpoint of iteration 11, which --load does not begin with (but with 9)",
        ),
        ({"contents": "another"}, "it is of a run that was in --save {save} before it was emptied"),
        ({"manifest": "another"}, "it follows on another checkpoint than {checkpoint}, which was saved in its place"),
    ],
)
def test_why_a_snapshot_is_not_used(
    change: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path)
    checkpoint_9(tmp_path / "save")
    path = snapshot(config, {**whole_header(config, tmp_path / "save"), **change})
    assert newest_snapshot(config, search(tmp_path)) is None
    expected = reason.format(save=tmp_path / "save", checkpoint=iteration_folder(tmp_path / "save", 9))
    assert f"the snapshot of iteration 12 in {path.parents[1]} is not used: {expected}\n" in capsys.readouterr().err


def test_every_field_of_the_layout_but_three_must_be_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the optimizer and the dtype of the weights. JSON gives a tuple back as a list."""
    config = config_of(tmp_path)
    config = dataclasses.replace(config, layout=dataclasses.replace(config.layout, cp_comm_type=("p2p", "a2a")))
    checkpoint_9(tmp_path / "save")
    header = whole_header(config, tmp_path / "save")
    snapshot(config, header)
    assert newest_snapshot(config, search(tmp_path)) is not None
    capsys.readouterr()
    free = {"distributed_timeout_minutes", "distributed_backend", "nccl_backend", "elastic"}
    fields = {field.name for field in dataclasses.fields(config.layout)}
    assert header["layout"].keys() == (fields - free) | {"optimizer", "params_dtype"}
    other = {**header["layout"], "world_size": 77, "optimizer": "sgd", "params_dtype": "bfloat16"}
    snapshot(config, {**header, "layout": other})
    assert newest_snapshot(config, search(tmp_path)) is None
    said = capsys.readouterr().err
    assert "it is of another layout (--world-size 77, now 1, --optimizer sgd, now adam, --bf16, now neither " in said
    assert set(re.findall("--[a-z0-9-]+", said)) - {"--load", "--save"} <= {option.flag for option in options()}
    assert json.loads(json.dumps(header["layout"])) == header["layout"]


def test_a_snapshot_of_a_checkpoint_that_has_expired_is_used(tmp_path: Path) -> None:
    """So is one of an earlier version, which names neither the folder's content nor a manifest."""
    config = config_of(tmp_path)
    checkpoint_9(tmp_path / "save")
    header = whole_header(config, tmp_path / "save")
    snapshot(config, {name: value for name, value in header.items() if name not in ("contents", "manifest")})
    assert newest_snapshot(config, search(tmp_path)) is not None
    snapshot(config, header)
    (iteration_folder(tmp_path / "save", 9) / checkpoint_manifest.MANIFEST).unlink()
    assert newest_snapshot(config, search(tmp_path)) is not None


@pytest.mark.parametrize(
    ("flags", "used"),
    [
        ({}, True),
        ({"load": None}, False),
        ({"load": "elsewhere"}, False),
        ({"ckpt_step": 0}, False),
        ({"ckpt_step": 9}, False),
        ({"finetune": True}, False),
        ({"no_load_optim": True}, False),
        ({"no_load_rng": True}, False),
        ({"non_persistent_local_ckpt_dir": None}, False),
    ],
)
def test_only_a_run_that_goes_on_with_all_of_it_takes_a_snapshot(
    flags: dict[str, Any], used: bool, tmp_path: Path
) -> None:
    config = config_of(tmp_path)
    checkpoint_9(tmp_path / "save")
    snapshot(config, whole_header(config, tmp_path / "save"))
    assert (newest_snapshot(config_of(tmp_path, **flags), search(tmp_path)) is not None) == used
    (tmp_path / "link").symlink_to("save")
    linked = newest_snapshot(config_of(tmp_path, **{"load": str(tmp_path / "link"), **flags}), search(tmp_path))
    assert (linked is not None) == used
