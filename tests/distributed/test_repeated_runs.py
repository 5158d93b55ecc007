"""`pretrain` with a user's own parts on ranks: a wrong loss is one error, and ranks that stay can train again."""

import contextlib
import io
import os
import shlex
from typing import Any

import pytest

from megatron_ext.cli.pretrain import main
from megatron_ext.resilience.process_end import RunStatus, run_guarded
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback
from megatron_ext.verify.ranks import run_ranks

MODEL = shlex.split(
    "--device cpu --mock-data --vocab-size 64 --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 "
    "--position-embedding-type rope --micro-batch-size 2 --global-batch-size 4 --train-iters 3 --lr 1e-2 "
    "--eval-iters 0 --hidden-dropout 0 --attention-dropout 0"
)
PIPELINE = ["--pipeline-model-parallel-size", "2"]


def mean(token: Any) -> Any:
    return token.cross_entropy().mean()


def program_with_a_mean(save: str) -> tuple[int, str]:
    status, errors = RunStatus(rank=int(os.environ["RANK"])), io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
        code = run_guarded(lambda: main([*MODEL, *PIPELINE, "--save", save], status, loss=mean), status)
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
        losses.append(pretrain([*MODEL, *layout]).losses)
        with pytest.raises(KeyError):
            pretrain([*MODEL, *layout], callbacks=[Fails])
    return losses


@pytest.mark.parametrize("flags", [PIPELINE, ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer"]])
def test_the_same_ranks_train_again_after_an_error_of_all(flags: list[str]) -> None:
    """In another layout, and in the first one to the bit."""
    first, last = run_ranks(2, again, flags)
    assert first == last
    assert first[0] == first[2]
    assert first[1] == pytest.approx(first[0], rel=1e-5)
