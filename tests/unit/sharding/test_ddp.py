"""Under megatron-core's DDP, gathers of weights that overlap with the forward pass, and who holds one copy of them.

tests/distributed/test_buckets.py compares runs whose weights are gathered late with others.
"""

from contextlib import suppress
from typing import Any

import pytest
import torch

from benchmarks.rehearsed_world import played
from megatron_ext import device
from megatron_ext.parallel import groups
from megatron_ext.sharding.ddp import DataParallel
from tests.support.small_models import small_config


class Chunk:
    """In the place of a wrapped model whose weights are gathered by hooks: what is done with these is written down."""

    def __init__(self, name: str, calls: list[str], model: torch.nn.Module | None = None):
        self.name, self.calls, self.model = name, calls, model
        self.narrow: list[Any] = []
        self.remove_forward_pre_hook_handles: dict[torch.nn.Module, Any] = {}

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        self.calls.append(f"{self.name} off{', gathered' if param_sync else ''}")

    def enable_forward_pre_hook(self) -> None:
        """Hook every module anew, as the engine does."""
        self.calls.append(f"{self.name} on")
        for module in self.model.modules() if self.model is not None else ():
            hook = module.register_forward_pre_hook(lambda one, _: self.calls.append(type(one).__name__))
            self.remove_forward_pre_hook_handles[module] = hook


@pytest.mark.parametrize("overlap", [True, False])
def test_gathers_are_off_while_weights_are_read(overlap: bool) -> None:
    """Of all chunks. Before an update nothing is gathered: the next forward pass would take it for the updated."""
    scheme = DataParallel(small_config(layout={"overlap_param_gather": overlap}))
    for context, gathered in ((scheme.gathered, ", gathered"), (scheme.gathered_before_update, "")):
        calls: list[str] = []
        with suppress(KeyError), context([Chunk("first", calls), Chunk("second", calls)]):
            calls.append("read")
            raise KeyError
        off = [f"{name} off{gathered}" for name in ("first", "second")] if overlap else []
        on = ["first on", "second on"] if overlap else []
        assert calls == [*off, "read", *on], "whatever happens inside"


def test_modules_without_weights_wait_for_none() -> None:
    """Also after a look at the weights, when the engine hooks every module anew; all hooks can still be removed."""
    scheme = DataParallel(small_config(layout={"overlap_param_gather": True}))
    for context in (scheme.gathered, scheme.gathered_before_update):
        calls: list[str] = []
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        chunk = Chunk("chunk", calls, model)
        with context([chunk]):
            calls.clear()
        calls.clear()
        model(torch.zeros(1, 2))
        assert calls == ["Linear"]
        for handle in chunk.remove_forward_pre_hook_handles.values():
            handle.remove()
        model(torch.zeros(1, 2))
        assert calls == ["Linear"]


def test_whole_experts_are_divided_over_other_ranks_than_the_rest() -> None:
    """Of eight ranks two by two share matrices, and four by four the experts."""
    layout = {
        "world_size": 8,
        "tensor_model_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
    }
    config = small_config({"num_experts": 4}, layout=layout)
    nothing: Any = None
    with played(0, 8):
        made = groups.initialize(config.layout, device.install("cpu"))
        dense, experts = DataParallel(config).holders_of_one_copy(nothing, made)
        assert torch.distributed.get_process_group_ranks(dense) == [0, 1]
        assert torch.distributed.get_process_group_ranks(experts) == [0, 1, 2, 3]
