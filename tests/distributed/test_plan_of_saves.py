"""A run plans its saves once: later ones write the same checkpoint, and ask other ranks for results alone."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import save
from megatron_ext.train.trainer import Trainer
from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import FLAGS, build, file_hashes

LAYOUTS = {
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_save_writes_the_same_by_the_plan_of_the_first(layout: str, tmp_path: Path) -> None:
    for first, second in run_ranks(2, _save_twice, str(tmp_path), [*FLAGS, *LAYOUTS[layout]]):
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
