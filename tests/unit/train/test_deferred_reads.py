"""Steps whose numbers are read later: by value, with torch's own optimizer and its weights, on a run made by hand."""

import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer import clip_grads

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.errors import DataError, NumericError
from megatron_ext.optim import gradient_norm
from megatron_ext.optim.torch_optimizer import torch_optimizer
from megatron_ext.resilience.progress import UPDATE
from megatron_ext.train import bad_step, deferred_reads, shared_numbers
from megatron_ext.train.deferred_reads import LateStep, LateSteps, can_read_late
from megatron_ext.train.shared_numbers import SharedNumbers, StopVotes
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import StepResult
from tests.support.small_models import small_config

CPU = torch.device("cpu")
NOTHING: Any = None
VOTES = StopVotes(0, 1, 0)
ADAM = OptimizerConfig(optimizer="adam", lr=0.1)


class Made:
    """A run of two weights with masters, a third without a gradient, and what is done in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, clip: float = 1.0, ranks: int = 1, **training: Any) -> None:
        self.calls: list[str] = []
        self.mains = [torch.nn.Parameter(torch.ones(size)) for size in (3, 2, 4)]
        self.weights = [torch.nn.Parameter(torch.ones(size)) for size in (3, 2, 4)]
        self.left_out = torch.zeros(2)
        self.share = torch.tensor([6.0, 12.0], dtype=torch.float64)
        self.of_norm: list[tuple[list[torch.nn.Parameter], list[float]]] = []
        first, second = (torch_optimizer(ADAM)([{"params": some}]) for some in (self.mains[:1], self.mains[1:]))
        self.optimizers: list[torch.optim.Optimizer] = [first, second]
        part = SimpleNamespace(
            get_parameters=lambda: self.mains,
            get_grads_for_grad_norm=lambda: [main.grad for main in self.mains[:2]],
            get_grad_stats_parallel_group=lambda: "the group of the norm",
            main_parameters=lambda: zip(self.weights, self.mains, strict=True),
            updater=SimpleNamespace(torch_optimizers=self.optimizers),
        )
        config = small_config(training={"bf16": True, **training})
        self.run: Any = SimpleNamespace(
            config=dataclasses.replace(config, optimizer=dataclasses.replace(ADAM, clip_grad=clip)),
            state=TrainState(iteration=4, consumed_samples=24),
            device=SimpleNamespace(torch_device=CPU, read_later=self._read_later, reads_wait=True),
            world_size=ranks,
            optimizer=SimpleNamespace(
                prepare_grads=lambda: self.calls.append("prepare"),
                chained_optimizers=[part],
                step_with_ready_grads=self._update,
            ),
            sharding=SimpleNamespace(
                parts=lambda optimizer: [part],
                finish_update=lambda optimizer: self.calls.append("finish"),
                host_memory_flags=(),
            ),
            progress=SimpleNamespace(phase=""),
            gradient_watch=SimpleNamespace(take_norms=lambda some, norms: self.of_norm.append((some, norms.tolist()))),
        )
        monkeypatch.setattr(clip_grads, "l2_norm_impl", gradient_norm.l2_norm)
        monkeypatch.setattr(torch.distributed, "all_reduce", self._all_reduce)
        monkeypatch.setattr(shared_numbers, "outside_norm", lambda optimizer: [self.left_out])
        monkeypatch.setattr(deferred_reads, "compute_gradients", self._gradients)
        monkeypatch.setattr(
            bad_step, "_numeric_error", lambda run, what, evidence: NumericError(f"{what} by {evidence}")
        )

    def _gradients(self, run: Any, global_batch: int) -> Any:
        self.calls.append(f"gradients of {global_batch}")
        shared = SharedNumbers(run)
        shared.add_loss(self.share)
        return SimpleNamespace(shared=shared, evidence="evidence")

    def _all_reduce(self, tensor: torch.Tensor, group: object = None) -> None:
        self.calls.append("sum of all" if group is None else f"sum over {group}")

    def _read_later(self, numbers: torch.Tensor) -> Any:
        self.calls.append("numbers")
        return numbers.clone().tolist

    def _update(self) -> None:
        self.calls.append("update")
        for optimizer in self.optimizers:
            optimizer.step()

    def begin(self, steps: LateSteps, *gradients: Sequence[float]) -> LateStep:
        """Take a step with these gradients of the first two weights."""
        for main, gradient in zip(self.mains, gradients, strict=False):
            main.grad = torch.tensor(gradient)
        return steps.begin(6, VOTES, lambda: self.calls.append(f"told in {self.run.progress.phase!r}"))

    def values(self) -> list[float]:
        return torch.cat([main.detach() for main in self.mains]).tolist()

    def gradients(self) -> list[float]:
        return [number for main in self.mains[:2] if main.grad is not None for number in main.grad.tolist()]


def test_a_late_step_is_done_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    step = made.begin(LateSteps(made.run), [3.0, 0.0, 0.0], [0.0, 4.0])
    before = ["gradients of 6", "told in ''", "prepare", "sum over the group of the norm"]
    assert made.calls == [*before, "numbers", "update", "finish"]
    assert made.run.progress.phase == UPDATE
    made.run.progress.phase = ""
    result, votes = step.result()
    assert result == StepResult(0.5, 12, 6, True, 5.0, 1.0, None)
    assert votes == VOTES
    assert made.run.progress.phase == UPDATE, "whoever waits for the device waits for the update"
    [(weights, norms)] = made.of_norm
    assert [id(weight) for weight in weights] == [id(weight) for weight in made.weights[:2]]
    assert norms == [3.0, 4.0]


def test_ranks_sum_their_numbers_and_norms_tell_of_one_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, ranks=2)
    made.begin(LateSteps(made.run), [3.0, 0.0, 0.0], [0.0, 4.0])
    assert made.calls[3:6] == ["sum over the group of the norm", "sum of all", "numbers"]
    assert made.of_norm == []


@pytest.mark.parametrize("clip", [0.0, 0.5, 2.5, 6.0])
def test_gradients_are_clipped_as_on_the_host(clip: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The share is computed in fp64 and rounded once; a smaller norm is left as it is, to the bit."""
    for seed in range(20):
        made = Made(monkeypatch, clip=clip)
        drawn = torch.randn(5, generator=torch.Generator().manual_seed(seed)) * 2.0
        made.begin(LateSteps(made.run), drawn[:3].tolist(), drawn[3:].tolist())
        parts = [drawn[:3].clone(), drawn[3:].clone()]
        norm = float(torch.linalg.vector_norm(torch.stack([part.norm() for part in parts])) ** 2.0) ** 0.5
        share = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
        assert made.gradients() == (drawn * torch.tensor(share, dtype=torch.float32)).tolist()
        known = torch_optimizer(ADAM)([{"params": [torch.nn.Parameter(torch.ones(5))]}])
        [alone] = known.param_groups[0]["params"]
        alone.grad = torch.tensor(made.gradients())
        known.step()
        assert made.values() == [*alone.tolist(), 1.0, 1.0, 1.0, 1.0]


def test_the_guard_is_what_optimizers_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's fused kernels read an fp32 number, of every optimizer that there is."""
    made = Made(monkeypatch)
    LateSteps(made.run)
    found: list[Any] = [getattr(one, "found_inf", None) for one in made.optimizers]
    assert found[0] is found[1]
    assert (found[0].dtype, found[0].shape, found[0].item()) == (torch.float32, (), 0.0)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "loss NaN": ({"share": [math.nan, 12.0]}, NumericError, "loss by evidence"),
    "loss infinite": ({"share": [math.inf, 12.0]}, NumericError, "loss by evidence"),
    "no tokens": ({"share": [0.0, 0.0]}, DataError, "iteration 5 "),
    "norm": ({"gradient": math.nan}, NumericError, "gradient by evidence"),
    "overflowed square": ({"gradient": 1e30}, NumericError, "gradient by evidence"),
    "left out": ({"left_out": math.inf}, NumericError, "gradient by evidence"),
}


@pytest.mark.parametrize("kind", BAD)
def test_from_a_bad_step_on_nothing_changes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bad, error, text = BAD[kind]
    made = Made(monkeypatch)
    steps = LateSteps(made.run)
    made.begin(steps, [3.0, 0.0, 0.0], [0.0, 4.0]).result()
    good = made.values()
    assert good != [1.0] * 9
    made.share = torch.tensor(bad.get("share", [6.0, 12.0]), dtype=torch.float64)
    made.left_out[1] = bad.get("left_out", 0.0)
    step = made.begin(steps, [bad.get("gradient", 3.0), 5.0, 0.0], [0.0, 4.0])
    assert made.values() == good
    assert made.gradients()[1:] == [5.0, 0.0, 0.0, 4.0], "they are what the report shows"
    # The next was begun before anybody has read of it.
    made.share, made.left_out = torch.tensor([6.0, 12.0], dtype=torch.float64), torch.zeros(2)
    made.begin(steps, [30.0, 0.0, 0.0], [0.0, 40.0])
    assert made.values() == good
    assert made.gradients() == [30.0, 0.0, 0.0, 0.0, 40.0]
    with pytest.raises(error, match=text):
        step.result()
    made.begin(steps, [3.0, 0.0, 0.0], [0.0, 4.0])
    assert made.values() != good, "who goes on in spite of it can"


def test_a_bad_step_changes_what_it_does_where_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, no_check_for_nan_in_loss_and_grad=True)
    step = made.begin(LateSteps(made.run), [math.nan, 0.0, 0.0], [0.0, 4.0])
    assert not any(hasattr(optimizer, "found_inf") for optimizer in made.optimizers)
    assert all(map(math.isnan, made.values()[:5]))
    assert step.result()[0].updated


def _reads_late(
    monkeypatch: pytest.MonkeyPatch, *, offload: bool = False, experts: bool = False, zeros: bool = False, **flags: Any
) -> bool:
    made = Made(monkeypatch, **flags)
    made.run.sharding.host_memory_flags = ("--optimizer-cpu-offload",) if offload else ()
    model = dataclasses.replace(made.run.config.model, num_experts=2 if experts else None)
    logging = dataclasses.replace(made.run.config.logging, log_num_zeros_in_grad=zeros)
    made.run.config = dataclasses.replace(made.run.config, model=model, logging=logging)
    return can_read_late(made.run)


@pytest.mark.parametrize(
    "needed",
    [
        {"check_before_update": True},
        {"fp16": True},
        {"loss_scale": 8.0},
        {"offload": True},
        {"experts": True},
        {"zeros": True},
    ],
    ids=str,
)
def test_what_needs_the_numbers_before_the_update(needed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _reads_late(monkeypatch)
    assert not _reads_late(monkeypatch, **needed)


def test_every_optimizer_must_take_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    made.optimizers.append(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))
    assert not can_read_late(made.run)
    made = Made(monkeypatch)
    made.run.device.reads_wait = False
    assert not can_read_late(made.run)


def _numbers(others: Sequence[float] = (), ranks: int = 1) -> Any:
    return SimpleNamespace(device=SimpleNamespace(torch_device=CPU), world_size=ranks, optimizer=None)


def test_what_a_rank_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and tokens in fp64, whether a gradient is bad, and each kind of vote in its place."""

    def doubled(tensor: torch.Tensor) -> None:
        tensor *= 2.0

    monkeypatch.setattr(torch.distributed, "all_reduce", doubled)
    left_out = torch.zeros(2)
    monkeypatch.setattr(shared_numbers, "outside_norm", lambda optimizer: [left_out])
    numbers = SharedNumbers(_numbers(ranks=2))
    own = numbers.loss
    loss, tokens = 1.0 + 2.0**-40, 2.0**24 + 1.0
    numbers.add_loss(torch.tensor([loss, tokens], dtype=torch.float64))
    assert (own.item(), own is numbers.loss) == (loss, True), "who holds it sees this rank's part"
    numbers.add_gradients_of(torch.tensor(3.0, dtype=torch.float64))
    votes = StopVotes(by_sigterm=0, otherwise=0, overdue=1)
    assert numbers.summed_on_device(votes).tolist() == [2 * loss, 2 * tokens, 0.0, 0.0, 0.0, 0.0, 2.0]
    assert own.item() == loss
    numbers = SharedNumbers(_numbers(ranks=2))
    own = numbers.loss
    numbers.add_loss(torch.tensor([loss, tokens], dtype=torch.float64))
    numbers.add_gradients(True, math.nan)
    assert numbers.summed()[:4] == (loss / tokens, int(2 * tokens), 0, 2)
    assert own.item() == loss, "that of all ranks is another"


@pytest.mark.parametrize(
    ("norm", "outside", "bad"),
    [(3.0, 0.0, 0.0), (math.inf, 0.0, 1.0), (math.nan, 0.0, 1.0), (3.0, math.nan, 1.0), (3.0, math.inf, 1.0)],
)
def test_a_bad_gradient_counts_in_the_norm_or_not(
    norm: float, outside: float, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_numbers, "outside_norm", lambda optimizer: [torch.tensor([1.0, outside])])
    on_device, on_host = SharedNumbers(_numbers()), SharedNumbers(_numbers())
    on_device.add_gradients_of(torch.tensor(norm, dtype=torch.float64))
    on_host.add_gradients(False, norm)
    assert on_device.summed_on_device(StopVotes()).tolist() == [0.0, 0.0, bad, 0.0, 0.0, 0.0, 0.0]
    assert on_host.summed()[2:4] == (int(bad), 0)


def test_the_sums_have_their_names() -> None:
    found = shared_numbers.summed([6.0, 12.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    assert found == (0.5, 12, 1, 2, StopVotes(by_sigterm=3, otherwise=4, overdue=5))
    assert shared_numbers.summed([0.25, 0.5, 0.0, 0.0])[:1] == (0.5,), "weights of tokens may be below one"
    assert math.isnan(shared_numbers.summed([0.0, 0.0, 0.0, 0.0]).loss)
    assert shared_numbers.summed([6.0, 12.0, 0.0, 0.0]).votes is None
