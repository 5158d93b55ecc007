"""--non-persistent-save-interval: a run that crashed goes on from its snapshots, bit for bit; their files move between
machines, as copies for others and for ranks that have none.
"""

import contextlib
import dataclasses
import io
import os
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native.resume import Search
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.snapshots import rank_file, snapshot_folder
from megatron_ext.plugins.snapshots.newest_snapshot import newest_snapshot
from megatron_ext.plugins.snapshots.snapshot_folder import file_of, folder_of, iterations, layout_of, ranks_at
from megatron_ext.plugins.snapshots.writer import SnapshotWriter
from megatron_ext.train.trainer import Trainer
from tests.support.checkpoints import FLAGS as SAVED_FLAGS
from tests.support.checkpoints import build, flip
from tests.support.launched import reproducible_rows
from tests.support.program import Ended, run_program, tiny
from tests.support.small_models import small_config

# Of the second tier: tests/unit/checkpoint/local.
pytestmark = pytest.mark.full

FLAGS = tiny("""
    --attention-dropout 0.1 --hidden-dropout 0.1 --global-batch-size 2 --train-iters 8 --lr 1e-2 --lr-warmup-iters 4
    --log-interval 3
""")
SNAPSHOTS = shlex.split("--non-persistent-save-interval 2 --non-persistent-ckpt-type local")
DISTRIBUTED = shlex.split("--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")


def _run(folder: str, flags: list[str], crashes_at: int | None) -> Ended:
    """Run on this rank, as if it had a machine, and so a memory, of its own."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="lo")

    step = Trainer.begin_step

    def crashing(self: Trainer):
        if self.run.state.iteration + 1 == crashes_at:
            torch.distributed.barrier()
            raise RuntimeError("crash")
        return step(self)

    Trainer.begin_step = crashing
    machine = f"{folder}/machine{os.environ['RANK']}"
    return run_program([*flags, *SNAPSHOTS, "--non-persistent-local-ckpt-dir", machine])


def run(folder: Path, flags: list[str], crashes_at: int | None = None) -> list[Ended]:
    save = ["--save", str(folder / "save"), "--load", str(folder / "save")]
    return run_ranks(2, _run, str(folder), [*FLAGS, *flags, *save], crashes_at)


def snapshots(folder: Path) -> dict[str, list[str]]:
    """The files by machine and iteration."""
    return {
        str(path.relative_to(folder)).replace(path.parent.name, "*"): sorted(file.name for file in path.iterdir())
        for path in sorted(folder.glob("machine*/*/iter_*"))
    }


def test_the_newest_of_snapshots_and_checkpoints_is_used_and_a_lost_machine_has_a_copy(tmp_path: Path) -> None:
    flags = [*DISTRIBUTED, "--save-interval", "5", "--replication"]
    [whole, *_] = run_ranks(2, run_program, [*FLAGS, *flags[:-1], "--save", str(tmp_path / "whole")])
    assert whole.code == 0, whole.errors
    expected = reproducible_rows(tmp_path / "whole/metrics.jsonl")
    place, before = tmp_path / "run", tmp_path / "before"

    crashed = run(place, flags, crashes_at=8)
    assert {ended.code for ended in crashed} == {1}
    assert "snapshots: every 2 steps to " in crashed[0].output
    files = snapshots(place)
    held = (["rank_00000", "rank_00001.copy"], ["rank_00000.copy", "rank_00001"])
    assert files == {f"machine{rank}/*/iter_000000{step}": held[rank] for rank in (0, 1) for step in (4, 6)}
    shutil.copytree(place, before)

    shutil.rmtree(place / "machine1")
    resumed = run(place, flags)
    assert {ended.code for ended in resumed} == {0}, resumed[0].errors
    assert "checkpoint: resuming at iteration 6 of the snapshots in " in resumed[0].output
    assert reproducible_rows(place / "save/metrics.jsonl") == expected
    assert snapshots(place) == {}, "a run that is saved leaves nothing in the memory"

    shutil.rmtree(place)
    shutil.copytree(before, place)
    for file in place.glob("machine*/*/iter_0000006/rank_00000*"):
        flip(file)
    resumed = run(place, flags)
    assert {ended.code for ended in resumed} == {0}, resumed[0].errors
    assert "warning: the snapshot of iteration 6 in " in resumed[0].errors
    assert "rank_00000 is damaged" in resumed[0].errors
    assert f"checkpoint: resuming at iteration 5 of {place / 'save'}\n" in resumed[0].output
    assert reproducible_rows(place / "save/metrics.jsonl") == expected


def test_an_evaluation_just_before_a_snapshot_leaves_nothing_in_it(tmp_path: Path) -> None:
    """megatron-core's ZeRO-3 keeps the tied embedding that the evaluation gathered, and a new process has none."""
    words = shlex.split(
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --eval-interval 6 --eval-iters 1"
    )
    run(tmp_path, words, crashes_at=8)
    resumed = run(tmp_path, words)
    assert {ended.code for ended in resumed} == {0}, resumed[0].errors
    assert "resuming at iteration 6 of the snapshots in " in resumed[0].output


# Slow: more schemes and precisions; the tests above have bf16 with the distributed optimizer, its gathers overlapped.
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--fp16 --initial-loss-scale 1e8 --loss-scale-window 4 --hysteresis 1",
        "--bf16 --use-torch-fsdp2",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
        "--bf16 --use-distributed-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-layers 4",
        "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear",
    ],
)
def test_every_scheme_goes_on_from_its_snapshots(flags: str, tmp_path: Path) -> None:
    words = shlex.split(flags)
    [whole, *_] = run_ranks(2, run_program, [*FLAGS, *words, "--save", str(tmp_path / "whole")])
    assert whole.code == 0, whole.errors
    run(tmp_path / "run", words, crashes_at=8)
    resumed = run(tmp_path / "run", words)
    assert {ended.code for ended in resumed} == {0}, resumed[0].errors
    assert "resuming at iteration 6 of the snapshots in " in resumed[0].output
    assert reproducible_rows(tmp_path / "run/save/metrics.jsonl") == reproducible_rows(tmp_path / "whole/metrics.jsonl")


SIZES = ((5, 7, 8), (20, 0, 1), (14, 3, 28), (0, 0, 21), (6, 0, 30))
"""Bytes of the file of each rank, moved in pieces of 7."""


def _content(rank: int, size: int) -> bytes:
    return bytes((100 * rank + place) % 256 for place in range(size))


def _move(folder: str) -> dict[str, Any]:
    """On each of three ranks: every way in which files move. Returns what was said and what there is afterwards."""
    torch.distributed.init_process_group("gloo")
    rank, group = torch.distributed.get_rank(), torch.distributed.new_group(backend="gloo")
    snapshot_folder._PIECE = 7
    to, origin = (rank + 1) % 3, (rank - 1) % 3
    place = Path(folder) / str(rank)
    place.mkdir()
    found: dict[str, Any] = {}
    for sizes in SIZES:
        own, copy = place / "own", place / "received" / "copy"
        own.unlink(missing_ok=True)
        copy.parent.mkdir(exist_ok=True)
        copy.write_text("of before")
        if sizes[rank]:
            own.write_bytes(_content(rank, sizes[rank]))
        said = snapshot_folder.exchange(own, to, copy, origin, group)
        found[f"round {sizes}"] = said, copy.read_bytes(), os.listdir(copy.parent)
    for size in (0, 6, 7, 8, 30):
        own, target = place / f"of {size} bytes", place / "new" / f"of {size} bytes"
        own.write_bytes(_content(rank, size))
        said = None
        if rank != 1:
            said = snapshot_folder.send_file(*((own, None) if rank == 2 else (None, target)), 2, 0, group)
        found[f"one way {size}"] = said, target.read_bytes() if rank == 0 else None
    # Where it cannot be written, it is received all the same: the sender is not left waiting.
    (place / "file").touch()
    (place / "own").write_bytes(_content(rank, 20))
    bad = place / "file" / "copy"
    target = bad if rank == 0 else place / "good" / "copy"
    found["bad place"] = snapshot_folder.exchange(place / "own", to, target, origin, group), target.exists()
    if rank < 2:
        found["bad target"] = snapshot_folder.send_file(*((place / "own", None) if rank else (None, bad)), 1, 0, group)
        (place / "folder.partial").mkdir()
        in_the_way = place / "folder"
        found["folder"] = snapshot_folder.send_file(
            *((None, in_the_way) if rank else (place / "own", None)), 0, 1, group
        )
    torch.distributed.destroy_process_group()
    return found


def test_files_of_any_size_go_to_the_next_rank_and_alone_to_one(tmp_path: Path) -> None:
    """Who has no file sends none, and what stands in its place stays."""
    found = run_ranks(3, _move, str(tmp_path))
    for sizes in SIZES:
        for rank in range(3):
            before = (rank - 1) % 3
            there = _content(before, sizes[before]) or b"of before"
            assert found[rank][f"round {sizes}"] == (None, there, ["copy"]), (sizes, rank)
    for size in (0, 6, 7, 8, 30):
        assert [each[f"one way {size}"] for each in found] == [(None, _content(2, size)), (None, None), (None, None)]
    assert [each["bad place"] for each in found] == [
        (f"File exists: {tmp_path / '0' / 'file'}", False), (None, True), (None, True)
    ]  # fmt: skip
    assert found[0]["bad target"] == f"File exists: {tmp_path / '0' / 'file'}"
    assert found[1]["bad target"] is None
    assert [each.get("folder") for each in found] == [
        None,
        f"Is a directory: {tmp_path / '1' / 'folder'}.partial",
        None,
    ]


def _newest(folder: str, header: dict[str, Any]) -> tuple[int | None, str, dict[str, str]]:
    """On each of three ranks, each with a machine of its own: which snapshot is taken, what is said, and the files of
    this machine."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    config = small_config()
    flags = {"save": f"{folder}/save", "load": f"{folder}/save", "non_persistent_local_ckpt_dir": f"{folder}/{rank}"}
    config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **flags))
    at = folder_of(config)
    assert at is not None

    def write(step: int, of: int, *, copy: bool = False, damaged: bool = False, **more: Any) -> None:
        path = file_of(at, step, of, copy=copy)
        path.parent.mkdir(parents=True, exist_ok=True)
        rank_file.write(path, {**header, "config.yaml": to_yaml(config), "of": of, **more}, {"w": torch.ones(3)})
        if damaged:
            path.write_bytes(path.read_bytes()[:-1] + b"x")

    if rank:
        write(8, rank)  # that of rank 0 is nowhere
    write(7, rank, layout={} if rank == 2 else header["layout"])
    write(6, rank, damaged=rank == 1)
    if rank == 0:
        write(5, 0)
        write(5, 1, copy=True)
    if rank == 2:
        write(5, 1, copy=True)
        write(5, 2)
    write(4, rank)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        found = newest_snapshot(config, Search(f"{folder}/save"))
    here = {str(path.relative_to(at)): str((rank_file.read_header(path) or {})["of"]) for path in at.glob("*5/rank_*")}
    torch.distributed.destroy_process_group()
    return None if found is None else found.iteration, said.getvalue(), here


def test_ranks_agree_on_the_newest_usable_snapshot_and_who_has_none_gets_its_file(tmp_path: Path) -> None:
    header = {"layout": layout_of(small_config()), "checkpoint": 0}
    found = run_ranks(3, _newest, str(tmp_path), header)
    assert [iteration for iteration, _, _ in found] == [5, 5, 5]
    files = [
        {"rank_00000": "0", "rank_00001.copy": "1"},
        {"rank_00001": "1"},
        {"rank_00001.copy": "1", "rank_00002": "2"},
    ]
    assert [here for *_, here in found] == [{f"iter_0000005/{name}": of for name, of in each.items()} for each in files]
    assert [said for _, said, _ in found[1:]] == ["", ""], "the first rank says it for all"
    lines = [line.partition(" is not used: ")[::2] for line in found[0][1].splitlines()]
    assert [line.partition("iteration ")[2][0] for line, _ in lines] == ["8", "7", "6"]
    assert lines[0][1] == "that of rank 0 is on no machine"
    assert lines[1][1].startswith("it is of another layout (--")
    assert lines[2][1].endswith("iter_0000006/rank_00001 is damaged")


def _replicate(folder: str, flags: list[str]) -> tuple[int, list[str], str | None, str | None]:
    """On each of three ranks: take two snapshots, of which rank 1 cannot write the second."""
    run = build([*flags, "--non-persistent-local-ckpt-dir", f"{folder}/{os.environ['RANK']}"])
    writer = SnapshotWriter(run)
    run.state.iteration = 1
    writer.take()
    writer.join()
    first = writer.problem
    copies = sorted(path.name for path in ranks_at(writer.folder, 1).values())
    run.state.iteration = 2
    if run.rank == 1:
        (writer.folder / "iter_0000002").touch()
    writer.take()
    writer.join()
    return len(iterations(writer.folder)), copies, first, writer.problem


@pytest.mark.parametrize(("jump", "from_rank"), [("2", [1, 2, 0]), ("4", [2, 0, 1])])
def test_a_copy_goes_as_many_ranks_further_as_the_flag_says(jump: str, from_rank: list[int], tmp_path: Path) -> None:
    """A rank that cannot write its own file, nor the other's, says so; the others have theirs."""
    words = "--global-batch-size 3 --non-persistent-ckpt-type local --non-persistent-save-interval 1 --replication"
    flags = [*SAVED_FLAGS, *words.split(), "--replication-jump", jump, "--save", str(tmp_path / "save")]
    found = run_ranks(3, _replicate, str(tmp_path), flags)
    for rank, (_, copies, first, second) in enumerate(found):
        assert first is None
        assert copies == sorted([f"rank_{rank:05d}", f"rank_{from_rank[rank]:05d}.copy"])
        assert (second is not None) == (rank == 1), second
