"""--overlap-param-gather gathers each bucket of weights before its first use, whoever reads it."""

import pytest

from megatron_ext.train.callbacks.evaluation import evaluate
from megatron_ext.train.trainer import Trainer
from megatron_ext.verify.ranks import run_ranks
from tests.support.checkpoints import build
from tests.support.program import TINY
from tests.support.selection import marked
from tests.support.several_models import in_turn

OWN = """
    --ffn-hidden-size 48 --train-iters 4 --lr 1e-2 --eval-interval 2 --eval-iters 1 --hidden-dropout 0
    --attention-dropout 0 --num-workers 0 --use-distributed-optimizer --overlap-grad-reduce --ddp-bucket-size 1000
"""
UNTIED = "--untie-embeddings-and-output-weights"
LAYOUTS = {
    "DP2, tied": (2, ""),
    "DP2, untied": (2, UNTIED),
    "DP2, untied, rotary, SwiGLU": (
        2,
        f"{UNTIED} --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear "
        "--qk-layernorm",
    ),
    "DP2, untied, experts": (2, f"{UNTIED} --num-experts 4 --disable-bias-linear"),
    "TP2 SP DP2, untied": (4, f"{UNTIED} --tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2 DP2, tied": (4, "--pipeline-model-parallel-size 2"),
}


def _numbers(flags: list[str]) -> list[str]:
    """Losses and norms of the gradients of four steps, and the loss of an evaluation after them."""
    run = build(flags)
    trainer, numbers = Trainer(run, []), []
    for _ in range(4):
        result = trainer.step()
        assert result.grad_norm is not None
        numbers += [result.loss.hex(), result.grad_norm.hex()]
    assert run.loaders.valid is not None
    numbers.append(evaluate(run, run.loaders.valid).hex())
    run.loaders.close()
    return numbers


# Slow: untied weights that the pipelined cases gather, too.
@pytest.mark.parametrize("name", marked(LAYOUTS, slow={"DP2, untied", "TP2 SP DP2, untied"}))
def test_weights_that_are_gathered_late_are_those_that_are_gathered_at_once(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    flags = [*TINY, *OWN.split(), *layout.split()]
    for at_once, late in run_ranks(ranks, in_turn, _numbers, [flags, [*flags, "--overlap-param-gather"]]):
        assert late == at_once
