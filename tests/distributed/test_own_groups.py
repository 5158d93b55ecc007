"""A rank makes its own process groups alone: they are those that megatron-core makes by itself, and the ranks agree."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.parallel_state import generate_masked_orthogonal_rank_groups
from torch.distributed.distributed_c10d import _world

from benchmarks.rehearsed_rank import groups_made
from benchmarks.rehearsed_world import played
from megatron_ext import device
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.parallel import groups as process_groups
from megatron_ext.parallel.own_groups import rank_groups
from tests.support.several_models import in_turn

LAYOUTS = {
    "TP2 PP4": LayoutConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=4),
    "TP2 CP2 PP2 VPP2": LayoutConfig(
        tensor_model_parallel_size=2,
        context_parallel_size=2,
        pipeline_model_parallel_size=2,
        num_virtual_stages_per_pipeline_rank=2,
    ),
    "EP2 PP2": LayoutConfig(expert_model_parallel_size=2, pipeline_model_parallel_size=2),
    "TP2 PP2, pipeline before data": LayoutConfig(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True
    ),
    # megatron-core counts data-parallel ranks of experts, although there are none.
    "CP2 PP2, pipeline before data": LayoutConfig(
        context_parallel_size=2, pipeline_model_parallel_size=2, use_tp_pp_dp_mapping=True
    ),
    "TP2 EP4 ETP1": LayoutConfig(
        tensor_model_parallel_size=2, expert_model_parallel_size=4, expert_tensor_parallel_size=1
    ),
    "DP8, two instances": LayoutConfig(num_distributed_optimizer_instances=2),
}
Made = dict[str, Any]


def _groups(layout: LayoutConfig) -> Made:
    """Make the groups of a layout; return description, ranks and sum over the ranks of each, and what was called.

    A rank that is played sums up alone, and its sum is taken from the list of ranks.
    """
    here = device.install("cpu")
    process_groups.start(layout, here)
    calls, original, before = [0], torch.distributed.new_group, _world.group_count
    known = groups_made().keys()

    def counted(**options: Any) -> Any:
        calls[0] += 1
        return original(**options)

    torch.distributed.new_group = counted
    process_groups.initialize(layout, here)
    torch.distributed.new_group = original
    by_name = {str(group.group_name): group for group in _world.pg_map}
    made = []
    for name, (purpose, ranks) in groups_made().items():
        if name not in known:
            total = torch.tensor(float(torch.distributed.get_rank()))
            torch.distributed.all_reduce(total, group=by_name[name])
            is_played = torch.distributed.get_backend() == "fake"
            made.append((purpose, ranks, float(sum(ranks)) if is_played else total.item()))
    return {"made": made, "calls": calls[0], "counted": _world.group_count - before}


def _of_all_layouts() -> list[Made]:
    """The groups of this rank alone, layout by layout."""
    return in_turn(_groups, list(LAYOUTS.values()))


def _played() -> list[list[tuple[Made, Made]]]:
    """By rank and layout, each rank played by this process: its groups alone, and as megatron-core has it."""
    found = []
    ours = process_groups.own_groups_only
    for rank in range(8):
        of_rank = []
        for layout in LAYOUTS.values():
            pair = []
            for context in (ours, nullcontext):
                process_groups.own_groups_only = context
                with played(rank, 8):
                    pair.append(_groups(layout))
            of_rank.append(tuple(pair))
        found.append(of_rank)
    return found


COUNTED = {
    "DP8": (8, LayoutConfig()),
    "TP2 PP2": (8, LayoutConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)),
    "TP4 PP4": (64, LayoutConfig(tensor_model_parallel_size=4, pipeline_model_parallel_size=4)),
    "TP8 PP8": (1024, LayoutConfig(tensor_model_parallel_size=8, pipeline_model_parallel_size=8)),
}


def _counts(bound: bool) -> dict[str, list[int]]:
    """By layout, how often the first and the last rank call torch's `new_group`: where the group of all ranks is bound
    to a GPU, as nccl2 binds it, and where it is not, as nccl-legacy leaves it."""
    found = {}
    for name, (world_size, layout) in COUNTED.items():
        found[name] = []
        for rank in (0, world_size - 1):
            with played(rank, world_size):
                everyone: Any = torch.distributed.group.WORLD
                everyone.bound_device_id = torch.device("cuda", 0) if bound else None
                found[name].append(_calls(layout))
    return found


def _calls(layout: LayoutConfig) -> int:
    calls, original = [0], torch.distributed.new_group
    everyone: Any = torch.distributed.group.WORLD

    def counted(**options: Any) -> Any:
        calls[0] += 1
        device_id, everyone.bound_device_id = everyone.bound_device_id, None  # no GPU splits a communicator here
        made = original(**options)
        everyone.bound_device_id = device_id
        return made

    torch.distributed.new_group = counted
    try:
        process_groups.initialize(layout, device.install("cpu"))
    finally:
        torch.distributed.new_group = original
    return calls[0]


@pytest.fixture(scope="module")
def real() -> list[list[Made]]:
    return run_ranks(8, _of_all_layouts)


@pytest.fixture(scope="module")
def of_played() -> list[list[tuple[Made, Made]]]:
    return run_ranks(1, _played)[0]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_groups_are_those_of_megatron_core(layout: str, real: list[list[Made]], of_played: Any) -> None:
    """Those of megatron-core are made by ranks that are played: eight that connect every group take long."""
    number = list(LAYOUTS).index(layout)
    for rank, (of_rank, of_played_rank) in enumerate(zip(real, of_played, strict=True)):
        own, everyones = of_rank[number], of_played_rank[number][1]
        assert own["made"] == everyones["made"]
        assert own["counted"] == everyones["counted"] == everyones["calls"]
        assert own["calls"] == len(own["made"]) < everyones["calls"]
        assert all(rank in ranks and total == sum(ranks) for _, ranks, total in own["made"])


def test_a_played_rank_has_the_groups_of_a_real_one(real: list[list[Made]], of_played: Any) -> None:
    assert [[own for own, _ in of_rank] for of_rank in of_played] == real


def test_ranks_are_listed_as_megatron_core_lists_them() -> None:
    device.install("cpu")
    random = np.random.default_rng(0)
    for _ in range(200):
        sizes = random.choice([1, 1, 2, 3, 4], random.integers(1, 7)).tolist()
        mask = (random.random(len(sizes)) < 0.5).tolist()
        world = int(np.prod(sizes))
        assert rank_groups(world, sizes, mask) == generate_masked_orthogonal_rank_groups(world, sizes, mask)


def test_with_nccl2_every_rank_takes_part_in_every_group() -> None:
    """It splits the communicator of all ranks for each group; with nccl-legacy a rank makes its own groups alone."""
    (own,), (everyones,) = (run_ranks(1, _counts, bound) for bound in (False, True))
    for name in COUNTED:
        first, last = everyones[name]
        assert first == last, "all ranks call together"
        assert max(own[name]) <= 20 < first
    assert everyones["TP8 PP8"] == [5249, 5249]
