"""Steps whose numbers are read later, as on a GPU: they have the bits of others, and bad ones change nothing.

tests/distributed/test_deferred_reads.py compares whole runs on ranks.
"""

import math
from typing import Any

import pytest
import torch
from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

from megatron_ext.errors import NumericError
from megatron_ext.model.names import biases_of_experts
from megatron_ext.train.deferred_reads import Guard, can_read_late
from megatron_ext.train.run import Run
from megatron_ext.train.step import TakenStep, train_step
from megatron_ext.train.step_allreduce import StopVotes
from tests.support.small_runs import are_equal, built, weights

VOTES = StopVotes(0, 1, 0)


def _begin(run: Run, guard: Guard | None, before_update: Any = lambda: None) -> TakenStep:
    for group in run.optimizer.param_groups:
        group["lr"] = 1e-2
    return train_step(run, range(4), before_update, guard=guard, votes=VOTES)


EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01"
INDEXED = """
    --multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8
    --experimental-attention-variant dsa --dsa-indexer-topk 4 --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8
    --dsa-indexer-loss-coeff 0.1 --normalization RMSNorm --disable-bias-linear
"""
KINDS = {
    "not clipped": "--clip-grad 0",
    "clipped": "--clip-grad 0.5",
    "within the largest norm": "--clip-grad 100",
    "depths": "--clip-grad 0.5 --mtp-num-layers 2 --bf16",
    "experts": f"--clip-grad 0.1 {EXPERTS}",
    "experts with biases": (
        f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate 0.1"
    ),
    "chosen keys": INDEXED,
    "largest products": "--log-max-attention-logit",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_late_step_has_the_bits_of_one_that_is_read_at_once(kind: str) -> None:
    """A gradient that is clipped is multiplied by the same share; a smaller one is left as it is. The losses of routers
    and indexers, and the largest product, are told, too."""
    flags = f"{KINDS[kind]} --hidden-dropout 0"
    with built(flags) as run:
        at_once = [_begin(run, None).result() for _ in range(3)]
        expected = weights(run)
    with built(flags, reads_wait=True) as run:
        assert can_read_late(run)
        guard = Guard(run)
        steps = [_begin(run, guard) for _ in range(3)]
        late = [step.result() for step in steps]
        assert are_equal(weights(run), expected)
    assert [result for result, _ in late] == [result for result, _ in at_once]
    assert ([votes for _, votes in late], [votes for _, votes in at_once]) == ([VOTES] * 3, [None] * 3)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scale_of_indexers_losses_is_set_whatever_an_earlier_run_has_left(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """megatron-core keeps the scale for the process, and the shape of the first."""
    monkeypatch.setattr(DSAIndexerLossAutoScaler, "main_loss_backward_scale", torch.full(shape, 7.0))
    with built(INDEXED, reads_wait=True) as run:
        _begin(run, Guard(run)).result()
    scale: Any = DSAIndexerLossAutoScaler.main_loss_backward_scale
    assert float(scale) != 7.0


class Faulty:
    """A loss that is what `kind` says while it is `on`."""

    on = False

    def __init__(self, kind: str):
        self.kind = kind

    def __call__(self, token: Any) -> torch.Tensor:
        losses = token.cross_entropy()
        if not self.on:
            return losses
        if self.kind == "no gradient":
            return losses * 1e30
        return losses + (math.nan if self.kind == "NaN" else math.inf)


def _bad_gradient(run: Run, *, outside_norm: bool, value: float) -> Any:
    """Return a function that puts a number into a gradient; the engine leaves a shared weight out of the norm."""
    weight: Any = next(
        one for chunk in run.chunks for name, one in chunk.named_parameters() if "final_layernorm.weight" in name
    )
    if outside_norm:
        weight.shared = True

    def spoil() -> None:
        weight.main_grad[3] = value

    return spoil


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("outside_norm", [False, True])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_ends_the_run_whether_it_is_in_the_norm_or_not(
    value: float, outside_norm: bool, late: bool
) -> None:
    with built(reads_wait=late) as run:
        spoil = _bad_gradient(run, outside_norm=outside_norm, value=value)
        before = weights(run)
        guard = Guard(run) if late else None
        with pytest.raises(NumericError, match=r"gradient of decoder\.final_layernorm\.weight, iteration 1 "):
            _begin(run, guard, spoil).result()
        assert are_equal(weights(run), before)


@pytest.mark.parametrize("kind", ["NaN", "infinity", "gradient"])
def test_from_a_bad_step_on_nothing_changes(kind: str) -> None:
    """The next step was begun before anybody has read of it; who goes on in spite of the error can."""
    loss = Faulty(kind)
    with built(reads_wait=True, loss=loss) as run:
        guard = Guard(run)
        _begin(run, guard).result()
        good = weights(run)
        loss.on = kind != "gradient"
        spoil = _bad_gradient(run, outside_norm=False, value=math.nan)
        bad = _begin(run, guard, spoil if kind == "gradient" else lambda: None)
        assert are_equal(weights(run), good)
        loss.on = False
        _begin(run, guard)
        assert are_equal(weights(run), good)
        with pytest.raises(NumericError, match=r"This iteration changed no weight"):
            bad.result()
        _begin(run, guard)
        assert not are_equal(weights(run), good)


def test_gradients_of_another_step_are_not_taken_for_those_of_the_bad_one() -> None:
    """The next step has its own by the time the numbers are read: that one of them is bad says nothing."""
    with built(reads_wait=True) as run:
        guard = Guard(run)
        spoil = _bad_gradient(run, outside_norm=True, value=math.nan)
        bad = _begin(run, guard, spoil)
        _begin(run, guard, spoil)
        with pytest.raises(NumericError, match=r"^the gradient became bad between the ranks: every rank's own part is"):
            bad.result()


def test_a_bad_step_moves_no_bias_of_experts() -> None:
    with built(KINDS["experts with biases"], reads_wait=True) as run:
        guard = Guard(run)
        before = state(run)
        bad = _begin(run, guard, _bad_gradient(run, outside_norm=False, value=math.nan))
        assert are_equal(state(run), before)
        with pytest.raises(NumericError, match="This iteration changed no weight"):
            bad.result()
        _begin(run, guard).result()
        assert [name for name in before if "expert_bias" in name and not torch.equal(state(run)[name], before[name])]


def state(run: Run) -> dict[str, torch.Tensor]:
    """Return copies of weights and of the biases by which experts are chosen."""
    biases = {name: bias.detach().clone() for name, bias in biases_of_experts(run.chunks)}
    return {**weights(run), **biases}


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_where_nothing_is_checked_a_bad_gradient_does_the_same_both_ways(value: float) -> None:
    """A norm that is NaN scales nothing, so that one bad gradient spoils its own weight alone."""
    found: list[tuple[dict[str, torch.Tensor], Any]] = []
    for late in (False, True):
        with built("--no-check-for-nan-in-loss-and-grad", reads_wait=late) as run:
            guard = Guard(run) if late else None
            result, _ = _begin(run, guard, _bad_gradient(run, outside_norm=False, value=value)).result()
            assert result.updated
            found.append((weights(run), result.grad_norm))
    (at_once, norm), (late_weights, late_norm) = found
    assert str(norm) == str(late_norm) == str(value)
    bad = {name: one.isnan() for name, one in at_once.items()}
    assert all(torch.equal(one, late_weights[name].isnan()) for name, one in bad.items())
    assert are_equal(*({name: one.nan_to_num() for name, one in each.items()} for each in (at_once, late_weights)))
    assert sum(int(one.sum()) for one in bad.values()) == 1
