"""How ranks write and read a checkpoint together: who does what with --ckpt-fully-parallel-save and -load, and that a
run plans its saves once. The checkpoint and the run are the same.
"""

import pickle
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import save
from megatron_ext.checkpoint.native.safe_reading import SafeReader
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.train.trainer import Trainer
from tests.support import resaving
from tests.support.checkpoints import FLAGS as SAVED_FLAGS
from tests.support.checkpoints import build, file_hashes
from tests.support.resaving import Saved, assert_same_tensors, resave, saved_by, tensors_of
from tests.support.selection import marked
from tests.support.several_models import in_turn

# Of the second tier: tests/distributed/test_checkpoint_layouts.py saves and reads by all ranks.
pytestmark = pytest.mark.full

FLAGS = [*resaving.FLAGS, "--num-layers", "2", "--micro-batch-size", "1", "--global-batch-size", "4"]
EXPERTS = "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 24 --expert-model-parallel-size 2"
LAYOUTS = {
    "DP3": (3, "--global-batch-size 3"),
    "DP2, bf16, distributed optimizer, in the background": (2, "--bf16 --use-distributed-optimizer --async-save"),
    "TP2 DP2": (4, "--tensor-model-parallel-size 2"),
    "experts on 2 of 4": (4, EXPERTS),
}


def _written_by_rank(folder: str) -> Counter[int]:
    """Bytes of the checkpoint's shards by the rank that wrote them."""
    sizes: Counter[int] = Counter()
    for path in Path(folder, "iter_0000002").glob("*.distcp"):
        rank = re.match(r"__(\d+)_", path.name)
        assert rank is not None
        sizes[int(rank[1])] += path.stat().st_size
    return sizes


def _saves(case: tuple[list[str], str]) -> list[float]:
    flags, folder = case
    return resave(flags, None, folder, steps=1)


# TP2 DP2 is slow: the others have both.
@pytest.mark.parametrize("layout", marked(LAYOUTS, slow={"TP2 DP2"}))
def test_ranks_write_the_same_checkpoint_together(layout: str, tmp_path: Path) -> None:
    ranks, words = LAYOUTS[layout]
    flags, folders = [*FLAGS, *words.split()], [str(tmp_path / name) for name in ("alone", "together")]
    cases = [(flags, folders[0]), ([*flags, "--ckpt-fully-parallel-save"], folders[1])]
    losses, *_ = run_ranks(ranks, in_turn, _saves, cases)
    alone, together = (Saved(folder, tensors_of(folder), own) for folder, own in zip(folders, losses, strict=True))
    assert_same_tensors(together, alone)
    assert together.losses == alone.losses
    sizes, before = _written_by_rank(together.folder), _written_by_rank(alone.folder)
    assert max(sizes.values()) < 0.75 * max(before.values()) or "distributed" in layout
    assert max(sizes.values()) < 1.7 * min(sizes[rank] for rank in range(ranks))


def _reads(flags: list[str], folder: str) -> tuple[int, list[float]]:
    """Elements of tensors that this rank read from the files, and the losses of the run that goes on."""
    read: list[int] = []
    original = SafeReader.read_data

    def counted(self: Any, plan: Any, planner: Any) -> Any:
        read.extend(item.lengths.numel() for item in plan.items if isinstance(item.lengths, torch.Size))
        return original(self, plan, planner)

    SafeReader.read_data = counted
    try:
        losses = resave(flags, folder, None, steps=1)
    finally:
        SafeReader.read_data = original
    return sum(read), losses


# fp32 without sharding is slow: there is less to read together.
@pytest.mark.parametrize("words", [pytest.param("", marks=pytest.mark.slow), "--use-distributed-optimizer --bf16"])
def test_ranks_read_together_what_they_hold_in_common(words: str, tmp_path: Path) -> None:
    flags = [*FLAGS, *words.split()]
    saved = saved_by((2, words), FLAGS, None, tmp_path, steps=1)
    own = run_ranks(2, _reads, flags, saved.folder)
    together = run_ranks(2, _reads, [*flags, "--ckpt-fully-parallel-load"], saved.folder)
    assert [losses for _, losses in own] == [losses for _, losses in together] == [saved.losses] * 2
    each, shared = own[0][0], sum(read for read, _ in together)
    if words:  # the weights once, and each rank its own half of the fp32 master and the two moments
        assert shared == pytest.approx(each * (1 + 3) / (1 + 3 / 2), rel=0.01)
    else:
        assert shared == pytest.approx(each, rel=0.01)
        assert all(read < 0.6 * each for read, _ in together)


def test_a_rank_reads_its_own_part_of_the_optimizers_state(tmp_path: Path) -> None:
    """Buckets of a few weights: every rank has a part of nearly every weight."""
    flags = [*FLAGS, "--use-distributed-optimizer", "--ddp-bucket-size", "3000"]
    saved = saved_by((2, "--use-distributed-optimizer"), FLAGS, None, tmp_path, steps=1)
    ranks = run_ranks(2, _reads, flags, saved.folder)
    [(alone, losses)] = run_ranks(1, _reads, FLAGS, saved.folder)
    assert [own for _, own in ranks] == [losses] * 2 or losses == pytest.approx(ranks[0][1], rel=1e-6)
    weights = alone / 3  # beside two moments
    for read, _ in ranks:
        assert weights * (1 + 0.7) < read < weights * (1 + 1.4)


PLANNED = {
    "bf16, distributed optimizer, DP2": ["--bf16", "--use-distributed-optimizer"],
    "DP2, written together": ["--ckpt-fully-parallel-save"],
    "FSDP2": ["--use-torch-fsdp2"],
}


def _save_twice(folder: str, flags: list[str]) -> list[list[tuple[str, int]]]:
    """Save after each of two steps, with one plan into "kept", and with a plan for each into "anew"; return what each
    save of "kept" sent to other ranks as objects: to whom, and bytes."""
    run, kept = build(flags), save.Kept()
    trainer = Trainer(run, [])
    sent: list[tuple[str, int]] = []

    def watched(name: str, position: int) -> None:
        original = getattr(torch.distributed, name)

        def call(*arguments: Any, **options: Any) -> Any:
            own = options["obj"] if "obj" in options else arguments[position]
            sent.append((name, len(pickle.dumps(own))))
            return original(*arguments, **options)

        setattr(torch.distributed, name, call)

    watched("all_gather_object", 1)
    watched("gather_object", 0)
    of_saves = []
    for _ in range(2):
        trainer.step()
        sent.clear()
        save.Save(run, f"{folder}/kept", background=False, kept=kept).finish()
        of_saves.append(list(sent))
        save.save_checkpoint(run, f"{folder}/anew")
    return of_saves


@pytest.mark.parametrize("layout", PLANNED)
def test_a_later_save_writes_the_same_by_the_plan_of_the_first(layout: str, tmp_path: Path) -> None:
    for first, second in run_ranks(2, _save_twice, str(tmp_path), [*SAVED_FLAGS, *PLANNED[layout]]):
        assert {name for name, _ in (*first, *second)} == {"gather_object"}, "nothing is sent to all ranks"
        assert len(first) == 4, "metadata, plan, results of the writes, files"
        assert len(second) == 2, "results of the writes, files"
        assert sum(size for _, size in second) < sum(size for _, size in first)
    kept, anew = (file_hashes(tmp_path / name) for name in ("kept", "anew"))
    assert kept.keys() == anew.keys()
    differ = {Path(name).name for name in kept if kept[name] != anew[name]}
    assert differ <= {".metadata", "manifest.json"}, "they name the folder, and its checksum"
    for iteration in (1, 2):
        one, other = (_metadata(tmp_path / name, iteration) for name in ("kept", "anew"))
        assert one == other
        assert len(one["storage_data"]) > 10


def _metadata(folder: Path, iteration: int) -> dict[str, Any]:
    metadata = pickle.loads((folder / f"iter_{iteration:07d}" / ".metadata").read_bytes())
    return {name: value for name, value in vars(metadata).items() if name != "storage_meta"}
