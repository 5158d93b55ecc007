"""--save-failure: what becomes of a run on two ranks whose disk refuses a checkpoint of one of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native import save
from megatron_ext.checkpoint.native.checkpoint_folder import saved_iterations
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors, differences
from tests.support.checkpoints import FLAGS
from tests.support.program import Ended, run_program


def _run(flags: list[str], refused: list[int]) -> Ended:
    """Run the program; rank 1 cannot write the checkpoints of these iterations, for its disk is full."""
    genuine, counted = save.write_shards, save.Save.__init__
    iteration = 0

    def counting(self: Any, run: Any, *arguments: Any, **options: Any) -> None:
        nonlocal iteration
        iteration = run.state.iteration
        counted(self, run, *arguments, **options)

    def write(request: Any, buckets: Any) -> None:
        import torch

        if torch.distributed.get_rank() == 1 and iteration in refused:
            raise OSError(28, "No space left on device", "shard")
        genuine(request, buckets)

    save.write_shards, save.Save.__init__ = write, counting
    return run_program(flags)


def _flags(folder: Path, *more: str) -> list[str]:
    steps = ["--train-iters", "7", "--save-interval", "2", "--log-interval", "1"]
    return [*FLAGS, "--num-layers", "1", *steps, "--save", str(folder), *more]


# The second case guards in the background what the first does in the loop.
@pytest.mark.parametrize("more", [[], pytest.param(["--async-save"], marks=pytest.mark.full)])
def test_a_run_outlives_a_failed_save(more: list[str], tmp_path: Path) -> None:
    kept = ["--save-failure", "warn", "--keep-last-checkpoints", "2"]
    ended = run_ranks(2, _run, _flags(tmp_path / "a", *kept, *more), [4])
    assert [one.code for one in ended] == [0, 0]
    warned = [line for line in ended[0].errors.splitlines() if "NO CHECKPOINT" in line]
    assert len(warned) == 1
    assert "NO CHECKPOINT of iteration 4: cannot save a checkpoint to" in warned[0]
    assert "No space left on device: shard. Earlier checkpoints there are whole." in warned[0]
    assert "NO CHECKPOINT" not in ended[1].errors, "one rank tells of it"
    rows = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    [failure] = [row for row in rows if "save_failure" in row]
    assert failure["iteration"] == 4
    assert "No space left on device" in failure["save_failure"]
    assert saved_iterations(tmp_path / "a") == [6, 7]
    assert not list((tmp_path / "a").glob(".iter*"))
    assert [one.code for one in run_ranks(2, _run, _flags(tmp_path / "b", *more), [])] == [0, 0]
    one, other = (Tensors(tmp_path / run / "iter_0000007") for run in "ab")
    assert list(differences(one, other)) == [], "what is trained is the same"


@pytest.mark.full
@pytest.mark.parametrize(
    ("more", "refused", "saved"),
    [([], [4], [2]), (["--save-failure", "warn"], [7], [2, 4, 6]), (["--save-failure", "warn"], [2, 4, 6, 7], [])],
)
def test_without_a_checkpoint_of_its_end_a_run_fails(
    more: list[str], refused: list[int], saved: list[int], tmp_path: Path
) -> None:
    """As every run does whose flags say nothing, at once."""
    ended = run_ranks(2, _run, _flags(tmp_path, *more), refused)
    assert [one.code for one in ended] == [74, 74]
    assert "No space left on device" in ended[0].errors.splitlines()[-1]
    assert saved_iterations(tmp_path) == saved
