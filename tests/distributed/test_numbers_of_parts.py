"""Numbers that parts of the model report are means by hand, in every layout, whether they are read now or a step later.

The model has them all: experts in the last of its two layers, indexers in both, and two depths of multi-token
prediction, whose layers are as the last one.
"""

import math
from functools import partial
from typing import Any

import pytest
import torch

from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.train.trainer import Callback, Trainer
from tests.support.checkpoints import build
from tests.support.indexed_attention import written_out
from tests.support.program import tiny
from tests.support.several_models import end_layout, in_turn

LAYERS, DEPTHS, LENGTH, BATCH, MICROBATCHES = 2, 2, 16, 2, 4
EXPERTS, CHOSEN, BALANCE, Z = 4, 2, 0.3, 0.02
FLAGS = tiny(f"""
    --position-embedding-type rope --normalization RMSNorm --disable-bias-linear --init-method-std 0.1 --train-iters 4
    --micro-batch-size {BATCH} --global-batch-size {BATCH * MICROBATCHES} --hidden-dropout 0 --attention-dropout 0
    --num-experts {EXPERTS} --moe-ffn-hidden-size 24 --moe-router-topk {CHOSEN} --moe-layer-freq [0,1]
    --moe-aux-loss-coeff {BALANCE} --moe-z-loss-coeff {Z} --mtp-num-layers {DEPTHS} --multi-latent-attention
    --q-lora-rank 12 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8
    --experimental-attention-variant dsa --dsa-indexer-n-heads 8 --dsa-indexer-head-dim 12 --dsa-indexer-topk 6
    --dsa-indexer-loss-coeff 0.1 --eval-iters 0 --num-workers 0
""")
LAYOUTS = {
    "one process": (1, ""),
    "recomputed": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "TP2": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "PP2": (2, "--pipeline-model-parallel-size 2"),
    "CP2": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "EP2": (2, "--expert-model-parallel-size 2 --use-distributed-optimizer"),
}


class _Written:
    """The losses of one microbatch of routers and indexers, from what these read."""

    def __init__(self, model: torch.nn.Module):
        from megatron_ext.parts.experts.router import Router
        from megatron_ext.plugins.latent_attention.compute import LatentSelfAttention

        self.balance: list[float] = []
        self.z: list[float] = []
        self.indexer: list[float] = []
        for module in model.modules():
            if isinstance(module, Router):
                module.register_forward_pre_hook(self._route)
            elif isinstance(module, LatentSelfAttention):
                module.register_forward_pre_hook(self._choose)

    def _route(self, router: Any, read: Any) -> None:
        """Fedus et al. 2021 (arXiv:2101.03961), equations 4 to 6; Zoph et al. 2022 (arXiv:2202.08906), equation 5."""
        logits = router.gating(read[0]).flatten(0, -2).double()
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(CHOSEN).indices, 1.0)
        share, probability = chosen.mean(0) / CHOSEN, logits.softmax(-1).mean(0)
        self.balance.append(EXPERTS * float((share * probability).sum()))
        self.z.append(float(logits.logsumexp(-1).square().mean()))

    def _choose(self, layer: Any, read: Any) -> None:
        """DeepSeek-V3.2 (arXiv:2512.02556), equation 3, per token."""
        visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().expand(BATCH, -1, -1)
        _, loss = written_out(layer, read[0], read[2], visible)
        self.indexer.append(float(loss) / layer.described.indexer.loss / (BATCH * LENGTH))


def _by_hand(flags: list[str]) -> dict[str, float]:
    """Return the means over layers and microbatches, and over the tokens of each depth."""
    from megatron.core.utils import unwrap_model

    run = build(flags)
    [model] = unwrap_model(run.chunks)
    written = _Written(model)
    sums, counts = torch.zeros(DEPTHS, dtype=torch.float64), torch.zeros(DEPTHS, dtype=torch.float64)
    for batch in run.loaders.train.global_batch(0, MICROBATCHES):
        with torch.no_grad():
            losses = model(batch.tokens, batch.position_ids, labels=batch.labels, ahead=batch.ahead)[1:]
        sums += (losses * batch.ahead.weights.permute(2, 0, 1)).sum((1, 2))
        counts += batch.ahead.weights.sum((0, 1))
    run.loaders.close()
    kinds = {"indexer_loss": written.indexer, "load_balancing_loss": written.balance, "z_loss": written.z}
    assert [len(of) for of in kinds.values()] == [
        MICROBATCHES * parts for parts in (LAYERS + DEPTHS, 1 + DEPTHS, 1 + DEPTHS)
    ]
    means = {name: math.fsum(of) / len(of) for name, of in kinds.items()}
    return means | {f"mtp_{depth}_loss": mean for depth, mean in enumerate((sums / counts).tolist(), start=1)}


def _by_the_program(flags: list[str]) -> list[list[dict[str, float]]]:
    """Return the numbers of three steps that are read before the update, and of three that are read late."""
    both = []
    for late in (False, True):
        steps: list[dict[str, float]] = []

        class Notes(Callback):
            def ends_before_next(self, trainer: Any) -> bool:
                return False

            def on_step_end(self, trainer: Any, result: Any, steps: list[dict[str, float]] = steps) -> None:
                steps.append(dict(result.numbers))

        trainer = Trainer(build(flags, reads_wait=late), [Notes()])
        assert (trainer._guard is not None) == late
        trainer.fit()
        trainer.run.loaders.close()
        both.append(steps)
        end_layout()
    return both


@pytest.fixture(scope="module")
def by_hand() -> dict[str, float]:
    return run_ranks(1, _by_hand, FLAGS)[0]


@pytest.mark.first("PP2")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_are_means_over_the_parts_that_report_them(layout: str, by_hand: dict[str, float]) -> None:
    """Each layer and each depth counts once; a layer without experts does not count in their means."""
    world_size, words = LAYOUTS[layout]
    for at_once, late in run_ranks(world_size, _by_the_program, [*FLAGS, *words.split()]):
        assert at_once[0] == pytest.approx(by_hand, rel=1e-5)
        assert late == at_once, "to the bit"
        assert len({numbers["z_loss"] for numbers in at_once}) == len(at_once) == 4, "each step has its own"


DENSE = tiny("--lr 1e-2 --train-iters 3 --clip-grad 0.5 --no-check-for-nan-in-loss-and-grad --eval-iters 0")


def _spoiled(flags: list[str], words: str) -> list[tuple[int, list[torch.Tensor], str]]:
    """Return for both ways of reading how many of this rank's weights are NaN after a step with one NaN in a gradient
    of the final norm, the weights without these, and the norm."""
    both = []
    for late in (False, True):

        class Spoil(Callback):
            def before_update(self, trainer: Any) -> None:
                for chunk in trainer.run.chunks:
                    for name, weight in chunk.named_parameters():
                        if "final_layernorm.weight" in name:
                            weight.main_grad[3] = math.nan

        trainer = Trainer(build([*flags, *words.split()], reads_wait=late), [Spoil()])
        assert (trainer._guard is not None) == late
        result = trainer.step()
        with trainer.run.gathered_parameters():
            weights = [weight.detach().clone() for chunk in trainer.run.chunks for weight in chunk.parameters()]
        trainer.run.loaders.close()
        bad = sum(int(weight.isnan().sum()) for weight in weights)
        both.append((bad, [weight.nan_to_num() for weight in weights], str(result.grad_norm)))
        end_layout()
    return both


def test_where_nothing_is_checked_one_nan_spoils_one_weight_both_ways() -> None:
    """A norm that is NaN scales nothing, on any rank."""
    layouts = ["", "--use-distributed-optimizer", "--pipeline-model-parallel-size 2"]
    for rank, found in enumerate(run_ranks(2, in_turn, partial(_spoiled, DENSE), layouts)):
        for layout, (at_once, late) in zip(layouts, found, strict=True):
            has_norm = rank == 1 or "pipeline" not in layout
            assert (at_once[0], at_once[2]) == (late[0], late[2]) == (int(has_norm), "nan"), layout
            assert all(map(torch.equal, at_once[1], late[1])), layout
