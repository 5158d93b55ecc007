"""--non-persistent-save-interval: a run that crashed goes on from its snapshots, bit for bit."""

import os
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from megatron_ext.train.trainer import Trainer
from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import flip
from tests.support.launched import reproducible_rows
from tests.support.program import TINY, Ended, run_program

OWN = """
    --attention-dropout 0.1 --hidden-dropout 0.1 --global-batch-size 2 --train-iters 8 --lr 1e-2 --lr-warmup-iters 4
    --log-interval 3
"""
FLAGS = [*TINY, *OWN.split()]
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
