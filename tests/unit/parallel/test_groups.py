"""Which ranks a layout puts into a group together, on ranks that this process plays, and how long they wait."""

import sys
from typing import Any

import pytest
import torch

from benchmarks.rehearsed_world import played
from megatron_ext import device
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.parallel import groups

LAYOUTS: list[tuple[dict[str, Any], dict[str, list[int]]]] = [
    ({}, {"tp": [0], "pp": [0], "cp": [0], "dp": list(range(16)), "ep": [0], "expt_tp": [0]}),
    ({"tensor_model_parallel_size": 4}, {"tp": [0, 1, 2, 3], "expt_tp": [0, 1, 2, 3], "dp": [0, 4, 8, 12]}),
    ({"pipeline_model_parallel_size": 2}, {"pp": [0, 8], "dp": list(range(8)), "mp": [0, 8]}),
    ({"pipeline_model_parallel_size": 2, "use_tp_pp_dp_mapping": True}, {"pp": [0, 1], "dp": list(range(0, 16, 2))}),
    ({"context_parallel_size": 2}, {"cp": [0, 1], "dp": list(range(0, 16, 2)), "dp_cp": list(range(16))}),
    (
        {"tensor_model_parallel_size": 4, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
        {"tp": [0, 1, 2, 3], "expt_tp": [0], "ep": [0, 1], "expt_dp": list(range(0, 16, 2))},
    ),
    (
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
        {"expt_tp": [0, 1], "ep": [0, 2], "expt_dp": [0, 4, 8, 12]},
    ),
    ({"num_distributed_optimizer_instances": 4}, {"intra_dp_cp": [0, 1, 2, 3], "inter_dist_opt": [0, 4, 8, 12]}),
]
"""Of 16 ranks, those that are with rank 0 in a group."""


@pytest.mark.parametrize(("layout", "expected"), LAYOUTS, ids=lambda one: "-".join(one) or "data-parallel")
def test_the_ranks_of_each_group(layout: dict[str, Any], expected: dict[str, list[int]]) -> None:
    with played(0, 16):
        made = groups.initialize(LayoutConfig(world_size=16, **layout), device.install("cpu"))
        found = {name: torch.distributed.get_process_group_ranks(getattr(made, name)) for name in expected}
        assert groups.tensor_group(made, expert=True) is made.expt_tp
        assert groups.tensor_group(made, expert=False) is made.tp
    assert found == expected


def test_chunks_of_a_stage_are_those_of_the_layout() -> None:
    from megatron.core import parallel_state

    for chunks in (1, 3):
        layout: dict[str, Any] = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": chunks}
        with played(0, 4):
            groups.initialize(LayoutConfig(world_size=4, **layout), device.install("cpu"))
            found = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        assert found == (chunks if chunks > 1 else None)


def _seconds(group: Any) -> float:
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()


def test_ranks_wait_as_many_minutes_as_the_flag_says_and_a_little_for_the_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The watch says first who is to blame. A run that is started twice has one group of all ranks."""
    monkeypatch.delenv("RANK", raising=False)
    layout, here = LayoutConfig(world_size=1, distributed_timeout_minutes=2.0), device.install("cpu")
    assert groups.start(layout, here) is not None
    try:
        assert groups.start(layout, here) is None
        made = groups.initialize(layout, here)
        assert torch.distributed.get_backend() == "gloo"
        assert _seconds(torch.distributed.group.WORLD) == 125.0
        assert _seconds(made.tp) == pytest.approx(125.0, abs=1.0)
    finally:
        groups.destroy()


def test_starting_again_writes_the_rank_once_before_a_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    for _ in range(3):
        groups.start(LayoutConfig(), device.install("cpu"))
        groups.destroy()
    sys.excepthook(ValueError, ValueError("no"), None)
    assert capsys.readouterr().err == "[rank0]: ValueError: no\n"
