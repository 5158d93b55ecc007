"""One step of a real small run: what it reports, what it changes, and which numbers end it before the update."""

import math
from typing import Any

import pytest
import torch

from megatron_ext.config.derived.batch_size import num_microbatches
from megatron_ext.data.corpus import Splits
from megatron_ext.errors import DataError, NumericError
from megatron_ext.train.gradient_watch import Finding
from megatron_ext.train.step import BatchLoss, StepResult, _sum, held_out_loss, run_microbatches, train_step
from megatron_ext.train.step_allreduce import _cause
from tests.support.small_runs import are_equal, built, weights

SGD = "--optimizer sgd --lr 1.0 --sgd-momentum 0 --weight-decay 0"
"""An update that subtracts the gradient."""


def _take(run: Any, *given: Any) -> StepResult:
    """Take a step of four samples at the rate that the flags say, which is the trainer's to set."""
    for group in run.optimizer.param_groups:
        group["lr"] = run.config.optimizer.lr
    result, votes = train_step(run, range(4), *given).result()
    assert votes is None
    return result


def _changes(flags: str) -> tuple[dict[str, torch.Tensor], StepResult]:
    """Return what a step adds to each weight, and what it reports."""
    with built(flags) as run:
        before = weights(run)
        result = _take(run)
        return {name: weight - before[name] for name, weight in weights(run).items()}, result


def test_the_norm_is_that_of_the_gradient_before_it_is_clipped() -> None:
    free, result = _changes(f"{SGD} --clip-grad 0")
    norm = math.sqrt(sum(float(change.double().square().sum()) for change in free.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    clipped, again = _changes(f"{SGD} --clip-grad 0.125")
    assert again == result
    for name, change in clipped.items():
        assert torch.allclose(change, free[name] * (0.125 / norm), atol=1e-6)


def test_the_loss_is_the_mean_over_all_tokens_of_the_batch() -> None:
    with built("--hidden-dropout 0 --attention-dropout 0") as run:
        batches = run.loaders.train.global_batch(0, 2)
        losses = run_microbatches(run, batches, forward_only=True)
        result = _take(run)
    assert losses[:, 1].tolist() == [32.0, 32.0]
    assert (result.tokens, result.global_batch_size, result.updated) == (64, 4, True)
    assert result.loss == pytest.approx(float(losses[:, 0].sum()) / 64, rel=1e-6)


def test_zeros_are_counted_where_it_is_asked_for() -> None:
    """Rows of tokens that the batch lacks have no gradient in an embedding that is not tied."""
    untied = "--untie-embeddings-and-output-weights"
    assert _changes(untied)[1].num_zeros is None
    counted = _changes(f"{untied} --log-num-zeros-in-grad")[1].num_zeros
    assert counted is not None
    assert counted >= 32


def test_callbacks_of_a_step_see_the_weights_that_its_loss_belongs_to() -> None:
    """`before_update` finds the gradients, `on_loss` the loss and the samples; neither finds a changed weight."""
    seen: list[Any] = []
    with built() as run:
        before = weights(run)

        def before_update() -> None:
            gradients: Any = [vars(weight)["main_grad"] for chunk in run.chunks for weight in chunk.parameters()]
            seen.append((are_equal(weights(run), before), any(bool(one.any()) for one in gradients)))

        def on_loss(loss: BatchLoss) -> None:
            seen.append((are_equal(weights(run), before), loss.mean, loss.samples))

        result = _take(run, before_update, on_loss)
        assert not are_equal(weights(run), before)
    assert seen == [(True, True), (True, result.loss, range(4))]


@pytest.mark.parametrize(
    ("flags", "scale"), [("", 1.0), ("--bf16 --loss-scale 8", 8.0), ("--fp16 --loss-scale 8", 8.0)]
)
def test_the_loss_scale_is_that_of_the_flags(flags: str, scale: float) -> None:
    """Also of a step that computes nothing."""
    with built(f"{flags} --skip-samples 4-7") as run:
        first = _take(run)
        run.state.consumed_samples = 4
        skipped = _take(run)
    assert (first.updated, first.loss_scale, skipped.loss_scale) == (True, scale, scale)


def test_an_overflow_updates_nothing_and_has_no_norm() -> None:
    with built("--fp16 --loss-scale 1e30") as run:
        before = weights(run)
        result = _take(run)
        assert are_equal(weights(run), before)
    assert (result.updated, result.grad_norm, result.tokens) == (False, None, 64)
    assert result.loss == pytest.approx(math.log(64), abs=0.5)


def test_samples_that_are_all_left_out_are_a_step_that_computes_nothing() -> None:
    with built("--skip-samples 0-3") as run:
        before = weights(run)
        assert _take(run) == StepResult(0.0, 0, 4, False, None, 1.0, None)
        assert are_equal(weights(run), before)
    with built("--skip-samples 0-2") as run:
        result = _take(run)
    assert (result.updated, result.tokens) == (True, 16)


def _own_losses(value: float) -> dict[str, Any]:
    """A loss that is `value`, and whose gradient is finite."""
    return {"loss": lambda token: token.cross_entropy() + value}


class _Uncounted:
    """Samples of which no token counts."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        ones = torch.ones(16, dtype=torch.int64)
        return {"tokens": ones, "labels": ones, "loss_mask": torch.zeros(16), "position_ids": torch.arange(16)}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_ends_the_run_before_the_update(value: float) -> None:
    """`on_loss` is told of it, whatever it is."""
    heard: list[float] = []
    with built("--no-check-for-nan-in-loss-and-grad", **_own_losses(value)) as run:
        assert _take(run).updated
    with built(**_own_losses(value)) as run:
        before = weights(run)
        with pytest.raises(NumericError, match=r"^rank 0: NaN or infinity in the loss, iteration 1 \(samples from 0\)"):
            _take(run, lambda: None, lambda loss: heard.append(loss.mean))
        assert are_equal(weights(run), before)
    assert len(heard) == 1
    assert not math.isfinite(heard[0])


def test_tokens_that_all_do_not_count_are_no_step() -> None:
    with built(datasets=lambda *_: Splits(_Uncounted(), None, None)) as run:
        run.state.iteration, run.state.consumed_samples = 4, 8
        said = r"^iteration 5 \(samples from 8\): not one token of its 4 samples counts"
        with pytest.raises(DataError, match=said):
            _take(run)


def _spoil(run: Any, value: float) -> None:
    """Have the gradient of the last norm come to be this number."""
    [weight] = [
        one for chunk in run.chunks for name, one in chunk.named_parameters() if "final_layernorm.weight" in name
    ]
    weight.register_hook(lambda gradient: torch.full_like(gradient, value))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_bad_gradient_is_named_and_changes_nothing(value: float) -> None:
    what = "32 NaN and 0 infinite" if math.isnan(value) else "0 NaN and 32 infinite"
    said = (
        rf"^rank 0: {what} values in the gradient of decoder\.final_layernorm\.weight, iteration 1 \(samples from 0\)"
    )
    with built() as run:
        before = weights(run)
        _spoil(run, value)
        with pytest.raises(
            NumericError, match=rf"{said}\. This iteration changed no weight\. Next: resume from the last"
        ):
            _take(run)
        assert are_equal(weights(run), before)
    with built("--no-check-for-nan-in-loss-and-grad") as run:
        _spoil(run, value)
        assert _take(run).updated


def test_a_weight_that_was_bad_before_is_the_cause_of_all_else() -> None:
    with built() as run:
        weight = next(
            one for chunk in run.chunks for name, one in chunk.named_parameters() if "linear_fc2.weight" in name
        )
        weight.data[0, :2] = torch.tensor([math.nan, math.inf])
        said = (
            r"^rank 0: 1 NaN and 1 infinite values in the weight decoder\.layers\.0\.mlp\.linear_fc2\.weight, at the "
            r"start of iteration 1 \(samples from 0\): an earlier update, or the memory of that rank, made it so"
        )
        with pytest.raises(NumericError, match=said):
            _take(run)


def test_the_cause_is_what_a_backward_pass_comes_to_first_on_the_lowest_rank() -> None:
    early, late = Finding((0, 1), "early"), Finding((3, 0), "late")
    assert _cause([early, None, late, late]) == "rank 2: late"
    assert _cause([None, early]) == "rank 1: early"
    assert _cause([None, None]) is None


def test_losses_are_added_in_fp64() -> None:
    """fp32 counts to 2^24, tokens too: from there on one more is none."""
    losses = torch.tensor([[2.0**24, 2.0**24], [1.0, 1.0], [1.0, 1.0]])
    assert _sum(losses).tolist() == [2**24 + 2, 2**24 + 2]
    assert _sum(losses).dtype == torch.float64


EXPERTS = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("--moe-aux-loss-coeff 0.1", (True, False, False, False)),
        ("--moe-aux-loss-coeff 0 --moe-z-loss-coeff 0.1", (False, False, False, True)),
        ("--moe-router-load-balancing-type none --moe-z-loss-coeff 1e-3", (False, False, False, True)),
        (
            "--moe-router-load-balancing-type global_aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.2",
            (False, True, True, False),
        ),
    ],
)
def test_auxiliary_losses_are_means_over_layers_and_microbatches(flags: str, has: tuple[bool, ...]) -> None:
    """The loss of a balanced router is 1, whatever its layers and microbatches. Steps that overflow tell them,
    too."""
    of: list[Any] = []
    for layers, batch, more in ((2, 2, ""), (4, 4, ""), (2, 2, "--fp16 --loss-scale 1e30")):
        with built(f"{EXPERTS} {flags} --num-layers {layers} --micro-batch-size {4 // batch} {more}") as run:
            result = _take(run)
            assert num_microbatches(run.config, 4) == batch
            of.append(result.numbers)
            assert result.updated == (not more)
    balance = ("load_balancing_loss", "seq_load_balancing_loss", "global_load_balancing_loss")
    for found in of:
        assert found.keys() == {name for name, is_so in zip((*balance, "z_loss"), has, strict=True) if is_so}
        for name, value in found.items():
            known = (math.log(4) ** 2, 0.2) if name == "z_loss" else (1.0, 0.1)
            assert value == pytest.approx(known[0], rel=known[1])


def test_held_out_losses_are_of_batches_of_their_own_size() -> None:
    with built("--eval-micro-batch-size 1 --eval-global-batch-size 4") as run:
        assert run.loaders.valid is not None
        batches = run.loaders.valid.loader.global_batch(0, 4, end=3)
        for chunk in run.chunks:
            chunk.eval()
        loss, tokens = held_out_loss(run, batches)
    assert tokens == 48, "the fourth sample is none"
    assert loss == pytest.approx(math.log(64), abs=0.5)
