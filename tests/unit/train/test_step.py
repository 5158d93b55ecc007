"""One step by itself: what is done in which order, what it reports, what it refuses, on a run made by hand."""

import dataclasses
import math
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import LoggingConfig, OptimizerConfig
from megatron_ext.data.skipped import SkippedSamples
from megatron_ext.errors import DataError, NumericError
from megatron_ext.train import bad_step, shared_numbers, step
from megatron_ext.train.gradient_watch import Finding
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import BatchLoss, StepResult, held_out_loss, run_microbatches, train_step
from tests.support.small_models import small_config

CPU = torch.device("cpu")
LOSSES = torch.tensor([[2.0, 4.0], [4.0, 8.0], [0.0, 0.0]])
"""Of three microbatches: half a nat for each of 12 tokens."""


class _Optimizer:
    """Writes down what is done with it; its loss scale grows with an update."""

    def __init__(self, calls: list[str], *, overflow: bool, norm: float):
        self.calls, self.overflow, self.norm, self.scale = calls, overflow, norm, 8.0
        self.chained_optimizers: list[Any] = []

    def zero_grad(self) -> None:
        self.calls.append("no gradients")

    def prepare_grads(self) -> bool:
        self.calls.append("prepare")
        return self.overflow

    def get_grad_norm(self) -> float:
        self.calls.append("norm")
        return self.norm

    def get_loss_scale(self) -> torch.Tensor:
        return torch.tensor(self.scale)

    def count_zeros(self) -> float:
        self.calls.append("count zeros")
        return 3.0

    def step_with_ready_grads(self) -> None:
        self.calls.append("update")
        self.scale = 16.0


def _run(
    monkeypatch: pytest.MonkeyPatch,
    *,
    overflow: bool = False,
    norm: float = 2.5,
    losses: torch.Tensor = LOSSES,
    outside: float = 0.0,
    clip: float = 1.0,
    zeros: bool = False,
    ranks: int = 1,
    training: dict[str, Any] | None = None,
    others: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
) -> tuple[Any, list[str]]:
    """A run at sample 24 of its data and 8 of its curves, and what is done in it.

    `others` is what the other ranks add to the sums of all.
    """
    calls: list[str] = []
    config = small_config(training={"fp16": True, "global_batch_size": 6, **(training or {})})
    config = dataclasses.replace(
        config, optimizer=OptimizerConfig(clip_grad=clip), logging=LoggingConfig(log_num_zeros_in_grad=zeros)
    )

    @contextmanager
    def loading() -> Any:
        calls.append("load")
        yield

    def global_batch(first: int, count: int) -> list[str]:
        calls.append(f"{count} microbatches from {first}")
        return ["microbatch"] * count

    def sum_of_all(values: torch.Tensor) -> None:
        values += torch.tensor(others, dtype=torch.float64)

    monkeypatch.setattr(torch.distributed, "all_reduce", sum_of_all)
    monkeypatch.setattr(shared_numbers, "outside_norm", lambda optimizer: [torch.tensor([outside])])

    def microbatches(run: Any, given: list[str], *, forward_only: bool) -> torch.Tensor:
        calls.append(f"{len(given)} passes" + (" forward" if forward_only else ""))
        return losses

    monkeypatch.setattr(step, "run_microbatches", microbatches)
    watched: list[torch.Tensor] = []

    def begin(loss: torch.Tensor) -> str:
        watched.append(loss)
        return "evidence"

    run = SimpleNamespace(
        config=config,
        state=TrainState(iteration=4, consumed_samples=24, scheduled_samples=8),
        device=SimpleNamespace(torch_device=CPU),
        world_size=ranks,
        chunks=[SimpleNamespace(zero_grad_buffer=lambda name=name: calls.append(f"clear {name}")) for name in "ab"],
        optimizer=_Optimizer(calls, overflow=overflow, norm=norm),
        sharding=SimpleNamespace(
            clip=lambda optimizer, most, norm: calls.append(f"clip {norm:g} to {most:g}"),
            finish_update=lambda optimizer: calls.append("finish"),
            parts=lambda optimizer: [],
        ),
        loaders=SimpleNamespace(skipped=SkippedSamples(), train=SimpleNamespace(global_batch=global_batch)),
        progress=SimpleNamespace(phase="", loading=loading, begin_batch=lambda phase: calls.append("begin")),
        gradient_watch=SimpleNamespace(begin=begin),
        watched=watched,
        gathered_parameters=nullcontext,
    )
    return run, calls


BEFORE = ["clear a", "clear b", "no gradients", "load", "3 microbatches from 24", "begin", "3 passes", "told"]


def test_a_step_is_done_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of 12 tokens, the norm before it is clipped, and the scale that the loss had."""
    run, calls = _run(monkeypatch, zeros=True)
    heard: list[BatchLoss] = []
    result = train_step(run, 6, lambda: calls.append("told"), heard.append)
    assert calls == [*BEFORE, "prepare", "norm", "clip 2.5 to 1", "count zeros", "update", "finish"]
    assert result == StepResult(0.5, 12, 6, True, 2.5, 8.0, 3.0, None)
    [loss] = heard
    assert (loss.mean, loss.of_microbatches is LOSSES, loss.samples) == (0.5, True, range(24, 30))
    assert [float(one) for one in run.watched] == [6.0], "this rank's part of the loss, written later"


def test_nothing_is_clipped_or_counted_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = _run(monkeypatch, clip=0.0)
    assert train_step(run, 6, lambda: calls.append("told")).num_zeros is None
    assert calls == [*BEFORE, "prepare", "norm", "update", "finish"]


def test_the_loss_scale_is_that_of_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bf16 there is one where a constant one is asked for; else it is 1, and the device is not asked."""
    for training, scale in (({"fp16": True}, 8.0), ({"fp16": False}, 1.0), ({"fp16": False, "loss_scale": 8.0}, 8.0)):
        run, _ = _run(monkeypatch, training=training)
        assert train_step(run, 6).loss_scale == scale


@pytest.mark.parametrize("overflow", [False, True])
def test_the_losses_of_routers_are_told_of_a_skipped_step_too(overflow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = _run(monkeypatch, overflow=overflow)
    run.config = dataclasses.replace(run.config, model=dataclasses.replace(run.config.model, num_experts=4))
    monkeypatch.setattr(step, "_auxiliary_losses", lambda run, count: f"of {count} microbatches")
    result = train_step(run, 6)
    assert (result.updated, result.auxiliary_losses) == (not overflow, "of 3 microbatches")


def test_an_overflow_on_all_ranks_updates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm of overflowed gradients is no number, and none is told."""
    run, calls = _run(monkeypatch, overflow=True, norm=math.nan, ranks=2, others=(2.0, 4.0, 0.0, 1.0))
    result = train_step(run, 6, lambda: calls.append("told"))
    assert calls == [*BEFORE, "prepare", "norm"]
    assert result == StepResult(0.5, 16, 6, False, None, 8.0, None, None)


@pytest.mark.parametrize(
    ("seen", "what"),
    [
        ({"losses": torch.tensor([[math.nan, 4.0]] * 3)}, "loss"),
        ({"losses": torch.tensor([[math.inf, 4.0]] * 3)}, "loss"),
        ({"norm": math.inf}, "gradient"),
        ({"norm": math.nan}, "gradient"),
        ({"outside": math.nan}, "gradient"),
        ({"outside": -math.inf}, "gradient"),
        ({"ranks": 2, "others": (0.0, 0.0, 1.0, 0.0)}, "gradient"),
        # An overflow is one on all ranks: of one alone the others know nothing.
        ({"overflow": True, "ranks": 2}, "gradient"),
        ({"overflow": True, "ranks": 3, "others": (0.0, 0.0, 0.0, 1.0)}, "gradient"),
        ({"ranks": 2, "others": (0.0, 0.0, 0.0, 1.0)}, "gradient"),
    ],
)
def test_a_number_that_is_none_ends_the_run_before_the_update(
    seen: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is told first, whatever it is."""
    run, calls = _run(monkeypatch, **seen)
    monkeypatch.setattr(bad_step, "_numeric_error", lambda run, what, evidence: NumericError(f"{what} by {evidence}"))
    heard: list[BatchLoss] = []
    with pytest.raises(NumericError, match=rf"^{what} by evidence$"):
        train_step(run, 6, lambda: None, heard.append)
    assert "update" not in calls
    assert len(heard) == 1
    run, calls = _run(monkeypatch, **seen, training={"no_check_for_nan_in_loss_and_grad": True})
    updated = not seen.get("overflow", False)
    assert (train_step(run, 6).updated, "update" in calls) == (updated, updated)


def test_one_token_is_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = _run(monkeypatch, losses=torch.tensor([[0.75, 1.0], [0.0, 0.0], [0.0, 0.0]]))
    result = train_step(run, 6)
    assert (result.loss, result.tokens, "update" in calls) == (0.75, 1, True)


def test_tokens_that_all_do_not_count_are_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = _run(monkeypatch, losses=torch.zeros(3, 2))
    with pytest.raises(DataError, match=r"iteration 5 \(samples from 24\): not one token of its 6 samples counts"):
        train_step(run, 6)
    assert "update" not in calls


def test_samples_that_are_all_left_out_are_a_step_without_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = _run(monkeypatch)
    run.loaders.skipped = SkippedSamples((range(20, 30),))
    assert train_step(run, 6) == StepResult(0.0, 0, 6, False, None, 8.0, None)
    assert calls == []
    run.loaders.skipped = SkippedSamples((range(20, 29),))
    assert train_step(run, 6).updated


def _scheduled(
    monkeypatch: pytest.MonkeyPatch, *, tensor_rank: int = 0, last: bool = True, recorder: Any = None, **flags: Any
) -> tuple[Any, dict[str, Any]]:
    """A run of two stages and two chunks, and what megatron-core's schedule is given."""
    given: dict[str, Any] = {}

    def schedule_of(stages: int, chunks: int | None) -> Any:
        given.update(stages=stages, chunks=chunks)

        def schedule(**named: Any) -> list[dict[str, torch.Tensor]]:
            given.update(named)
            return [{"lm loss": torch.tensor([float(n), 1.0])} for n in range(named["num_microbatches"])]

        return schedule

    monkeypatch.setattr(step, "get_forward_backward_func", schedule_of)
    layout = flags.pop("layout", {})
    config = small_config(training=flags, layout={"pipeline_model_parallel_size": 2, "world_size": 2, **layout})
    run = SimpleNamespace(
        config=config,
        chunks=["first", "second"],
        groups=SimpleNamespace(pp=SimpleNamespace(size=lambda: 2), tp=SimpleNamespace(rank=lambda: tensor_rank)),
        p2p="messages",
        is_last_stage=last,
        recorder=recorder,
        captured_passes=None,
        progress=SimpleNamespace(begin_microbatch=lambda: None),
        device=SimpleNamespace(torch_device=CPU),
        world_size=1,
    )
    return run, given


def test_what_the_schedule_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    run, given = _scheduled(monkeypatch, micro_batch_size=2)
    batches: Any = ["one", "two", "three"]
    run_microbatches(run, batches, forward_only=False)
    assert len(given.pop("data_iterator")) == 2, "every chunk reads all of them"
    assert given == {
        "stages": 2,
        "chunks": None,
        "forward_step_func": step._forward_step,
        "model": ["first", "second"],
        "num_microbatches": 3,
        "seq_length": 16,
        "micro_batch_size": 2,
        "forward_only": False,
        "pg_collection": run.groups,
        "p2p_communicator": "messages",
    }
    layout = {"num_virtual_stages_per_pipeline_rank": 2}
    recorder = SimpleNamespace(watched=lambda function: ("watched", function))
    run, given = _scheduled(monkeypatch, recorder=recorder, linear_cross_entropy=True, layout=layout)
    run_microbatches(run, batches, forward_only=True, micro_batch_size=5)
    assert given["forward_step_func"] == ("watched", step._summed_forward_step)
    assert (given["chunks"], given["micro_batch_size"], given["forward_only"]) == (2, 5, True)


@pytest.mark.parametrize(
    ("forward_only", "recorder", "captured"),
    [(False, None, True), (True, None, False), (False, SimpleNamespace(watched=lambda function: function), False)],
)
def test_training_alone_is_captured_and_not_what_is_recorded(
    forward_only: bool, recorder: Any, captured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph has inputs of its own on the device, where batches are copied from host memory."""
    run, given = _scheduled(monkeypatch, recorder=recorder)
    taken: list[list[Any]] = []

    def passes(**named: Any) -> list[dict[str, torch.Tensor]]:
        taken.append([list(batches) for batches in named["data_iterator"]])
        return [{"lm loss": torch.tensor([7.0, 1.0])}]

    run.captured_passes = passes
    batches: Any = ["one"]
    found = run_microbatches(run, batches, forward_only=forward_only)
    assert (found.tolist(), "model" in given) == (([[7.0, 1.0]], False) if captured else ([[0.0, 1.0]], True))
    assert taken == ([[["one"], ["one"]]][: int(captured)])


@pytest.mark.parametrize(("rank", "last"), [(0, True), (1, True), (0, False)])
def test_one_of_those_that_hold_the_same_loss_counts_it(rank: int, last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = _scheduled(monkeypatch, tensor_rank=rank, last=last)
    batches: Any = ["one", "two", "three"]
    found = run_microbatches(run, batches, forward_only=True)
    counts = [[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]] if (rank, last) == (0, True) else [[0.0, 0.0]] * 3
    assert (found.tolist(), found.dtype) == (counts, torch.float32)


def test_held_out_losses_are_of_batches_of_their_own_size(monkeypatch: pytest.MonkeyPatch) -> None:
    run, given = _scheduled(monkeypatch, micro_batch_size=2, eval_micro_batch_size=3, eval_global_batch_size=3)
    batches: Any = ["one", "two", "three"]
    assert held_out_loss(run, batches) == (1.0, 3)
    assert (given["micro_batch_size"], given["forward_only"]) == (3, True)
    run.world_size = 2
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.add_(torch.tensor([9.0, 1.0])))
    assert held_out_loss(run, batches) == (3.0, 4)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.zero_())
    loss, tokens = held_out_loss(run, batches)
    assert math.isnan(loss)
    assert tokens == 0


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"moe_aux_loss_coeff": (0.1,)}, (0.7 / 12, None)),
        ({"moe_aux_loss_coeff": (0.0,), "moe_z_loss_coeff": 0.1}, (None, 0.1 / 12)),
        ({"moe_router_load_balancing_type": ("none",), "moe_z_loss_coeff": 0.0}, (None, 0.1 / 12)),
    ],
)
def test_auxiliary_losses_are_means_over_layers_and_microbatches(
    flags: dict[str, Any], expected: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three microbatches and four layers, in fp64; a loss that is no part of the sum is none. --moe-z-loss-coeff 0
    asks for it all the same."""
    monkeypatch.setattr(step, "take_auxiliary_losses", lambda groups: (0.7, 0.1))
    config = small_config({"num_experts": 4, **flags})
    run: Any = SimpleNamespace(config=config, groups="groups", world_size=1, device=SimpleNamespace(torch_device=CPU))
    found = step._auxiliary_losses(run, 3)
    assert (found.load_balancing, found.z) == expected


def _said(
    monkeypatch: pytest.MonkeyPatch,
    *,
    weight: float = 0.0,
    gradient: Finding | None = None,
    reduced: bool = False,
    of_these: bool = True,
) -> str:
    """What is said of a bad gradient by rank 1 of two, where rank 0 has found nothing."""
    run, _ = _run(monkeypatch, ranks=2)
    bad = Finding((1, 1), "the reduced gradient") if reduced else None
    run.gradient_watch = SimpleNamespace(
        diagnose=lambda evidence: gradient,
        in_reduced_gradients=lambda gradients: bad,
        is_of_these_gradients=lambda evidence: evidence == "of these",
    )
    named = [("first", torch.tensor([1.0, 2.0])), ("second", torch.tensor([weight, math.inf if weight else 1.0]))]
    whole: list[bool] = []

    @contextmanager
    def gathered() -> Any:
        whole.append(True)
        yield
        whole.clear()

    def parameters(chunks: Any) -> Any:
        assert whole, "a rank's weights may be those of before the last update, or none"
        return iter(named)

    run.gathered_parameters = gathered
    monkeypatch.setattr(bad_step, "global_named_parameters", parameters)
    monkeypatch.setattr(bad_step, "gradients_of_update", lambda parts: [])

    def gather(seen: list[Any], own: tuple[Finding | None, ...]) -> None:
        seen[:] = [(None, None, None), own]

    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    evidence: Any = "of these" if of_these else "of earlier ones"
    return str(bad_step._numeric_error(run, "gradient", evidence))


def test_the_error_names_the_cause_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bad weight makes all else bad; then a gradient before its reduction; then one after it."""
    gradient = Finding((2, 2), "its own gradient")
    text = _said(monkeypatch, weight=math.nan, gradient=gradient, reduced=True)
    assert text.startswith(
        "rank 1: 1 NaN and 1 infinite values in the weight second, at the start of iteration 5 (samp"
    )
    when = "iteration 5 (samples from 24). This iteration changed no weight."
    assert _said(monkeypatch, gradient=gradient, reduced=True).startswith(f"rank 1: its own gradient, {when}")
    assert _said(monkeypatch, reduced=True).startswith(f"rank 1: the reduced gradient, {when}")
    # Of a step that is over, other gradients are there.
    for text in (_said(monkeypatch), _said(monkeypatch, reduced=True, of_these=False)):
        assert text.startswith(f"the gradient became bad between the ranks: every rank's own part is finite, {when}")
