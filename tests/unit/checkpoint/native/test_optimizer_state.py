"""The optimizer's state as a checkpoint holds it: by weight, in its own dtype, with the number of updates."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_ext.checkpoint.native import optimizer_state
from megatron_ext.checkpoint.native.optimizer_state import joined
from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.torch_optimizer import begin_state, torch_optimizer
from megatron_ext.parallel.rows import RowShard
from tests.support.optimizer_parts import optimizer_part

ADAM = OptimizerConfig(optimizer="adam", lr=0.1)


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lion"])
def test_state_of_every_optimizer_goes_back_to_its_own_weight(optimizer: str) -> None:
    """Weights of equal shape in two optimizers; one of them is divided, of the other this rank writes one weight."""
    config = OptimizerConfig(optimizer=optimizer, lr=0.1)
    states = traits_of(config).state_names(config)
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    parts = [optimizer_part(config, weights[:2], divides=False), optimizer_part(config, weights[2:], divides=True)]
    names = {id(weight): f"weight {number}" for number, weight in enumerate(weights)}
    values = itertools.count(1)
    loaded = {
        state: {name: torch.tensor([next(values), next(values)], dtype=torch.float32) for name in names.values()}
        for state in states
    }
    for part in parts:
        optimizer_state.initialize_state(part, config)
    optimizer_state.restore(parts, config, names, loaded)
    buffers: dict[Any, torch.Tensor] = {}

    def copy(name: Any, tensor: torch.Tensor) -> torch.Tensor:
        assert name not in buffers
        buffers[name] = tensor.clone()
        return buffers[name]

    taken = optimizer_state.take(parts, config, copy, {id(weights[1])})
    assert [(one.part, one.moments) for one in taken] == [(part, states) for part in parts]
    held = {names[key]: state for one in taken for key, state in one.own.items()}
    assert {name: {state: tensor.tolist() for state, tensor in own.items()} for name, own in held.items()} == {
        f"weight {number}": {state: loaded[state][f"weight {number}"].tolist() for state in states}
        for number in (1, 2, 3)
    }
    optimizer_state.set_step_count(parts, config, 4)
    assert optimizer_state.step_count(parts) == (4 if traits_of(config).counts_updates else 0)


def test_a_number_of_updates_is_each_weights_own() -> None:
    """Also where what was loaded is one tensor for all: torch would advance it once for each weight."""
    config = OptimizerConfig(optimizer="adam", lr=0.1)
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    part = optimizer_part(config, weights, divides=False)
    optimizer_state.initialize_state(part, config)
    [optimizer], shared = part.updater.torch_optimizers, torch.tensor(0.0)
    for weight in weights:
        optimizer.state[weight]["step"] = shared
    optimizer_state.set_step_count([part], config, 4)
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer.step()
    assert [optimizer.state[weight]["step"].item() for weight in weights] == [5.0] * 3


def test_averages_begin_in_the_dtype_that_is_asked_for() -> None:
    config = OptimizerConfig(optimizer="adam", lr=0.1, exp_avg_dtype="bf16", exp_avg_sq_dtype="fp32")
    weight = torch.nn.Parameter(torch.zeros(2))
    part = optimizer_part(config, [weight], divides=False)
    optimizer_state.initialize_state(part, config)
    [optimizer] = part.updater.torch_optimizers
    found = {name: tensor.dtype for name, tensor in optimizer.state[weight].items()}
    assert (found["exp_avg"], found["exp_avg_sq"]) == (torch.bfloat16, torch.float32)


def test_rows_of_state_are_counted_from_this_ranks_first() -> None:
    """Rows 4 and 5, and 6 and 7, of a weight of eight."""
    weight = ShardedTensor.from_rank_offsets("weight", torch.zeros(8, 2), replica_id=(0, 0, 0))
    shards = [RowShard(torch.zeros(2, 2), first, (8, 2), None) for first in (4, 6)]
    found = optimizer_state._pieces(weight, shards, torch.arange(8.0).view(4, 2), "exp_avg.weight")
    data = {key: torch.as_tensor(piece.data).tolist() for key, piece in found.items()}
    assert {key: (piece.global_offset, data[key]) for key, piece in found.items()} == {
        "0": ((4, 0), [[0.0, 1.0], [2.0, 3.0]]),
        "1": ((6, 0), [[4.0, 5.0], [6.0, 7.0]]),
    }


@pytest.mark.parametrize(("fused", "capturable"), [(True, False), (False, True), (False, False)])
def test_the_count_lies_where_the_kernel_reads_it(fused: bool, capturable: bool) -> None:
    main = torch.empty(2, device="meta")
    group = {"params": [main], "fused": fused, "capturable": capturable}
    adam: Any = torch_optimizer(ADAM)([{"params": [torch.nn.Parameter(torch.ones(1))]}])
    begin_state(main, group, adam, ADAM)
    state = adam.state[main]
    assert state["step"].device.type == ("meta" if fused or capturable else "cpu")
    assert {name: tensor.dtype for name, tensor in state.items()} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "step"), torch.float32
    )


def _saved(local: tuple[int, ...], of: tuple[int, ...], offset: tuple[int, ...], axes: int = 0) -> ShardedTensor:
    """Return a part of a tensor of the checkpoint, which has `axes` axes more before those of the weight."""
    data = torch.zeros(*local, dtype=torch.bfloat16)
    whole = ShardedTensor.from_rank_offsets("weight", data, replica_id=(0, 1, 2))
    return replace(whole, global_shape=of, global_offset=offset, axis_fragmentations=None, prepend_axis_num=axes)


def _weight(*parts: ShardedTensor) -> ShardedTensorFactory:
    """Return a weight that is saved in these parts."""
    build: Any = lambda *_: list(parts)  # noqa: E731
    return ShardedTensorFactory("weight", torch.zeros(1), build, build)


def _pieces(weight: Any, shard: RowShard, rows: torch.Tensor) -> list[tuple[Any, ...]]:
    found = optimizer_state.pieces(weight, shard, rows, "state")
    assert {piece.key for piece in found.values()} == {"state"}
    assert {piece.replica_id for piece in found.values()} == {(0, 1, shard.replica)}
    assert [piece.dtype for piece in found.values()] == [rows.dtype] * len(found)
    return [(piece.global_offset, torch.as_tensor(piece.data).tolist()) for piece in found.values()]


def test_rows_of_several_tensors_are_saved_where_they_belong() -> None:
    """A weight of six rows is rows 4 to 6 of one tensor and 20 to 22 of another; this rank has its rows 1 to 4."""
    weight = _weight(_saved((3, 2), (10, 2), (4, 0)), _saved((3, 2), (30, 2), (20, 0)))
    rows = torch.arange(8.0).view(4, 2)
    assert _pieces(weight, RowShard(rows, 1, (6, 2), None, replica=3), rows) == [
        ((5, 0), [[0.0, 1.0], [2.0, 3.0]]),
        ((20, 0), [[4.0, 5.0], [6.0, 7.0]]),
    ]


def test_rows_of_stacked_experts_are_whole_matrices() -> None:
    """Of three experts of 4 by 5 in layer 3, a rank has the second and third; none of the first is written."""
    experts = [_saved((4, 5), (9, 9, 12, 5), (3, expert, 8, 0), axes=2) for expert in range(3)]
    rows = torch.arange(40.0).view(2, 4, 5)
    assert _pieces(_weight(*experts), RowShard(rows, 1, (3, 4, 5), None, replica=7), rows) == [
        ((3, expert, 8, 0), [[rows[expert - 1].tolist()]]) for expert in (1, 2)
    ]
    rows = torch.arange(20.0).view(4, 5)
    assert _pieces(_weight(*experts), RowShard(rows, 6, (12, 5), None, replica=0), rows) == [
        ((3, 1, 10, 0), [[rows[:2].tolist()]]),
        ((3, 2, 8, 0), [[rows[2:].tolist()]]),
    ]


def test_pieces_are_joined_by_their_numbers() -> None:
    pieces = {str(number): torch.full((1, 1, 2), float(number)) for number in (10, 9, 2)}
    shard = RowShard(torch.zeros(3, 2), 0, (3, 2), None)
    assert joined(shard, pieces).tolist() == [[2.0, 2.0], [9.0, 9.0], [10.0, 10.0]]


def test_pieces_are_joined_in_the_order_of_their_numbers() -> None:
    pieces = {str(number): torch.full((1, 1, 2), float(number)) for number in (10, 2, 11, 0, 1)}
    whole = joined(RowShard(torch.zeros(5, 2), 0, (5, 2), None), pieces)
    assert whole.tolist() == [[float(number)] * 2 for number in (0, 1, 2, 10, 11)]
