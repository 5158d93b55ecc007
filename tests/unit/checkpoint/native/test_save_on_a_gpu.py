"""What a save asks of a device whose reads wait: one number for all counts of updates, and, while it is written in the
background, none that is not there yet. Stand-ins of a device and of another rank."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import optimizer_state
from megatron_ext.checkpoint.native.save import Save
from tests.support.operator_calls import Calls, aten


class Device:
    """Reads numbers when it is told to, and remembers which."""

    torch_device = torch.device("cpu")

    def __init__(self, *, reads_wait: bool) -> None:
        self.reads_wait = reads_wait
        self.given: list[float] = []
        self.read: list[int] = []

    def read_later(self, numbers: torch.Tensor) -> Callable[[], list[float]]:
        number = len(self.given)
        self.given.append(float(numbers))

        def read() -> list[float]:
            self.read.append(number)
            return [self.given[number]]

        return read


def asked(device: Device, *others: bool) -> list[bool]:
    """What a save of a rank that has written says step after step, while another rank writes or does not."""
    save: Any = object.__new__(Save)
    save.run, save._thread = SimpleNamespace(device=device), None
    found = []
    for other in others:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", lambda sent, op, other=other: sent.clamp_(min=float(other)))
            found.append(save.written())
    return found


def test_who_waits_for_other_ranks_reads_the_answer_of_the_step_before() -> None:
    gpu = Device(reads_wait=True)
    assert asked(gpu, True, True, False, False) == [False, False, False, True]
    assert gpu.given == [1.0, 1.0, 0.0, 0.0]
    assert gpu.read == [0, 1, 2], "never the last, behind which the next step waits"
    cpu = Device(reads_wait=False)
    assert asked(cpu, True, False) == [False, True]
    assert cpu.read == [0, 1]


def part_of(*optimizers: torch.optim.Optimizer) -> Any:
    return SimpleNamespace(updater=SimpleNamespace(torch_optimizers=list(optimizers)))


def test_the_count_of_updates_is_read_once_for_all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [torch.ones(2, requires_grad=True) for _ in range(8)]
    adam, momentum = torch.optim.AdamW(weights[:7]), torch.optim.SGD(weights[7:], momentum=0.9)
    parts = [part_of(adam), part_of(momentum)]
    assert optimizer_state.step_count(parts) == 0
    for _ in range(3):
        for weight in weights:
            weight.grad = torch.ones(2)
        adam.step()
        momentum.step()
    lists: list[int] = []
    genuine = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: lists.append(tensor.numel()) or genuine(tensor))
    with Calls() as calls:
        assert optimizer_state.step_count(parts) == 3
    assert lists == [7]
    assert aten._local_scalar_dense.default not in {operator for operator, _, _ in calls.calls}
    adam.state[weights[0]]["step"] += 1.0
    with pytest.raises(AssertionError, match="differ in their number of updates"):
        optimizer_state.step_count(parts)
    monkeypatch.setitem(momentum.param_groups[0], "step", 3)  # as apex counts
    adam.state[weights[0]]["step"] -= 1.0
    assert optimizer_state.step_count(parts) == 3
