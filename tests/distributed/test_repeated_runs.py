"""`pretrain` again on the same ranks: after an error of all, in another layout, stage after stage (--stages)."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.cli.pretrain import main
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.resilience.process_end import RunStatus, run_guarded
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback
from tests.support.small_runs import MODEL

# Of the second tier: tests/unit/train/test_pretrain_repeated.py repeats runs in one process.
pytestmark = pytest.mark.full

FLAGS = [*MODEL, *["--eval-iters", "0", "--hidden-dropout", "0", "--attention-dropout", "0"]]
PIPELINE = ["--pipeline-model-parallel-size", "2"]


def mean(token: Any) -> Any:
    return token.cross_entropy().mean()


def program_with_a_mean(save: str) -> tuple[int, str]:
    status, errors = RunStatus(rank=int(os.environ["RANK"])), io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = run_guarded(lambda: main([*FLAGS, *PIPELINE, "--save", save], status, loss=mean), status)
    return code, errors.getvalue()


def test_a_wrong_loss_is_told_by_the_rank_that_has_it(tmp_path: Any) -> None:
    """The first stage has no loss: it has lost a peer, and is silent."""
    first, last = run_ranks(2, program_with_a_mean, str(tmp_path))
    assert (first[0], last[0]) == (76, 64)
    assert first[1] == ""
    said, ended = last[1].splitlines()
    assert said.startswith("loss= returned a tensor of shape []: it must return the loss of every token, [batch, ")
    assert ended.startswith("rank 1: 1 problem in the configuration, named above; found at iteration 1.")
    assert '"code": 64' in (tmp_path / "exit.json").read_text()


def again(flags: list[str]) -> list[tuple[float, ...]]:
    class Fails(Callback):
        def on_step_end(self, trainer: Any, result: Any) -> None:
            raise KeyError("own")

    losses = []
    for layout in (flags, [], flags):
        losses.append(pretrain([*FLAGS, *layout]).losses)
        with pytest.raises(KeyError):
            pretrain([*FLAGS, *layout], callbacks=[Fails])
    return losses


@pytest.mark.parametrize("flags", [PIPELINE, ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer"]])
def test_the_same_ranks_train_again_after_an_error_of_all(flags: list[str]) -> None:
    """In another layout, and in the first one to the bit."""
    first, last = run_ranks(2, again, flags)
    assert first == last
    assert first[0] == first[2]
    assert first[1] == pytest.approx(first[0], rel=1e-5)


STAGED = {
    "DP2, distributed optimizer": "--use-distributed-optimizer",
    "CP2": "--context-parallel-size 2 --cp-comm-type p2p",
    "PP2": "--pipeline-model-parallel-size 2",
}


def _losses(cases: list[list[str]]) -> list[list[float]]:
    return [list(pretrain(flags).losses) for flags in cases]


def test_losses_of_stages_are_those_of_one_process(tmp_path: Path) -> None:
    """Groups, model and data are made anew where a stage begins (--stages)."""
    stages = tmp_path / "stages.yaml"
    stages.write_text("1: {seq_length: 32}\n3: {seq_length: 48, rotary_base: 70000, micro_batch_size: 1}")
    words = [*FLAGS, "--train-iters", "4", "--stages", str(stages), "--save"]
    [[alone]] = run_ranks(1, _losses, [[*words, str(tmp_path / "alone")]])
    assert len(alone) == 4
    cases = [[*words, str(tmp_path / layout), *flags.split()] for layout, flags in STAGED.items()]
    for of_rank in run_ranks(2, _losses, cases):
        assert of_rank == [pytest.approx(alone, rel=1e-5)] * len(STAGED)
