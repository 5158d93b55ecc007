"""Everything that a checkpoint holds is written under its own name and put back where it was: no two values here are
equal, and every combination of what is left out is tried."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_ext.checkpoint.native import contents, load, optimizer_state
from megatron_ext.checkpoint.native.contents import Contents, Parts
from megatron_ext.checkpoint.native.folder import Found
from megatron_ext.checkpoint.native.resume import Search
from megatron_ext.config.derived.optimizers import traits_of
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.errors import DataError
from megatron_ext.parallel.rows import RowShard
from tests.support.made_run import FIELDS, LOADED, YES_NO, Made, optimizer_part


@pytest.mark.parametrize(("optimizer", "rng", "progress"), itertools.product(YES_NO, repeat=3))
def test_every_part_is_put_back_by_itself(
    optimizer: bool, rng: bool, progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch)
    before = made.random()
    contents.restore(made.run, Contents({}, {}, {5: "w"}, {}), Parts(optimizer, rng, progress), dict(LOADED))
    config = made.run.config.optimizer
    assert made.asked == [
        ("model", "first chunk"),
        ("model1", "second chunk"),
        *([] if optimizer else [("masters of", "the optimizer")]),
        *(
            [
                ("restore", ["part"], config, {5: "w"}, "its state"),
                ("set_step_count", ["part"], config, 5),
                ("scaler", "its scale"),
            ]
            if optimizer
            else []
        ),
    ]
    expected = [(101 if progress else 11) + number for number in range(len(FIELDS))]
    if progress and not optimizer:
        expected[FIELDS.index("scheduled_samples")] = 0
    assert made.numbers() == expected
    assert made.random() == ({"": 1, "tp": 2, "tp-expert": 3, "data": 4} if rng else before)


def test_rows_are_put_back_from_their_own_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of one chunk has the name of a weight of the other."""
    made = Made(monkeypatch)
    rows = {name: RowShard(torch.zeros(1, 2), 0, (1, 2), None) for name in ("model.a.w", "model1.a.w", "model.a.w2")}
    rows["model.none"] = RowShard(torch.zeros(0, 2), 0, (1, 2), None)
    read = {name: {"0": torch.full((1, 2), float(number))} for number, name in enumerate(rows, 1)}
    loaded = LOADED | {
        "model": {"a.w": read["model.a.w"], "a.w2": read["model.a.w2"]}, "model1": {"a.w": read["model1.a.w"]}
    }  # fmt: skip
    contents.restore(made.run, Contents({}, {}, {}, rows), Parts(False, False, False), loaded)
    assert [shard.local.tolist() for shard in rows.values()] == [[[1.0, 1.0]], [[2.0, 2.0]], [[3.0, 3.0]], []]
    assert made.asked == [("masters of", "the optimizer")], "the modules are not asked to load"


@pytest.mark.parametrize(("no_optim", "no_rng", "parallel"), itertools.product(YES_NO, repeat=3))
def test_every_number_is_saved_under_its_own_name(
    no_optim: bool, no_rng: bool, parallel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {"no_save_optim": no_optim, "no_save_rng": no_rng, "ckpt_fully_parallel_save": parallel}
    made = Made(monkeypatch, **flags)
    own, others = (SimpleNamespace(data=torch.ones(1), replica_id=(0, replica)) for replica in (0, 1))
    new: Any = Contents({"model": {}}, {"own": own, "others": others}, {}, {})  # pyright: ignore
    monkeypatch.setattr(contents, "models_of", lambda run: new)
    monkeypatch.setattr(contents, "_spread", lambda models, run: made.asked.append("spread"))
    monkeypatch.setattr(contents.own_parameters, "names", lambda config: ["of one's own"])

    def copy(name: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    taken = contents.take(made.run, copy)
    progress = dict(zip(FIELDS, made.numbers(), strict=True))
    expected: dict[str, Any] = {"train_state": progress, "iteration": 11, "own_parameters": ["of one's own"]}
    if not no_optim:
        expected |= {"optimizer_step": 6, "grad_scaler": {"scale": 8.0}}
    if not no_rng:
        expected |= {"rng_grid": [2, 3, 5], "rng_state": taken.others.get("rng_state")}
    assert taken.others == expected
    assert taken.optimizer == ([] if no_optim else ["taken"])
    config = made.run.config.optimizer
    asked = [("take", ["part"], config, copy, {id(own.data)}), ("step_count", ["part"])]
    assert made.asked == [*(["spread"] if parallel else []), *([] if no_optim else asked)]
    made.state.iteration = 12
    assert taken.others["train_state"]["iteration"] == 11, "of the moment of the save"
    if not no_rng:
        state: Any = taken.others["rng_state"]
        assert (state.key, state.global_shape, state.global_offset) == ("rng_state", (2, 3, 5), (1, 2, 4))
        for tensor in made.tracker.states.values():
            tensor.add_(50)
        assert {name: int(tensor) for name, tensor in state.data["tracker"].items()} == {
            "tp": 10, "tp-expert": 11, "data": 12
        }  # fmt: skip
        assert int(state.data["dropout"]) == 99


def test_rows_are_written_by_who_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch, ckpt_fully_parallel_save=True, no_save_optim=True, no_save_rng=True)
    rows = {"w": RowShard(torch.zeros(1), 0, (1,), None)}
    monkeypatch.setattr(contents, "models_of", lambda run: Contents({}, {}, {}, rows))
    monkeypatch.setattr(contents, "_spread", lambda models, run: pytest.fail("another rank has no such rows"))
    contents.take(made.run, lambda name, tensor: tensor)


@pytest.mark.parametrize(("optimizer", "rng", "progress"), itertools.product(YES_NO, repeat=3))
def test_what_is_wanted_is_asked_for(
    optimizer: bool, rng: bool, progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(monkeypatch)
    weights: Any = {"w": "weight"}
    monkeypatch.setattr(contents, "models_of", lambda run: Contents({"model": "chunk"}, weights, {}, {}))
    monkeypatch.setattr(contents.optimizer_state, "state_to_load", lambda *given: ("to read", *given))
    found: Any = contents.to_load(made.run, Parts(optimizer, rng, progress)).state_dict
    assert list(found) == ["model", *(["optimizer"] if optimizer else []), *(["rng_state"] if rng else [])]
    assert found["model"] == "chunk"
    if optimizer:
        assert found["optimizer"] == ("to read", ["part"], made.run.config.optimizer, weights)
    if rng:
        assert (found["rng_state"].global_shape, found["rng_state"].global_offset) == ((2, 3, 5), (1, 2, 4))


def test_what_was_taken_is_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents.optimizer_state, "state_to_save", lambda *given: ("state", *given))
    models: Any = Contents({"model": "by reference"}, {"w": 1}, {}, {}, {"w": 2})  # pyright: ignore
    optimizer, exchange, given = ["taken"], "the exchange", {"iteration": 7, "train_state": {}}
    taken: Any = contents.RunSnapshot(models, {"model": "copy"}, optimizer, given)  # pyright: ignore
    expected = {"model": "copy", **given, "optimizer": ("state", optimizer, {"w": 1}, {"w": 2}, exchange)}
    assert contents.to_save(taken, exchange) == expected  # pyright: ignore
    taken.optimizer = []
    assert contents.to_save(taken, exchange) == {"model": "copy", **given}  # pyright: ignore


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


GRID = [2, 3, 5]


def test_every_flag_leaves_out_its_own_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for finetune, no_optim, no_rng, weights_only, release, grid, has_optim in itertools.product(
        YES_NO, YES_NO, YES_NO, YES_NO, YES_NO, (GRID, [3, 2, 5], None), YES_NO
    ):
        made = Made(monkeypatch, finetune=finetune, no_load_optim=no_optim, no_load_rng=no_rng)
        common: dict[str, Any] = {"rng_grid": grid, "weights_only": weights_only}
        common |= {"optimizer_step": 0} if has_optim else {}
        found = Found(tmp_path / ("release" if release else "iter_0000003"), 3)
        if weights_only or release:
            assert load._wanted(made.run, found, common) == Parts(False, False, False)
        elif has_optim or finetune or no_optim:
            assert load._wanted(made.run, found, common) == Parts(
                optimizer=not finetune and not no_optim,
                rng=not finetune and not no_rng and grid == GRID,
                progress=not finetune,
            )
        else:
            with pytest.raises(DataError, match="was saved without optimizer state"):
                load._wanted(made.run, found, common)


@pytest.mark.parametrize("rank", [0, 13])
def test_new_random_numbers_are_told_of_where_any_dropout_draws(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: list[str] = []
    monkeypatch.setattr(load, "warn", said.append)
    for attention, hidden, grid in itertools.product((0.0, 0.1), (0.0, 0.2), ([3, 2, 5], None)):
        made = Made(monkeypatch)
        made.run.rank = rank
        model = dataclasses.replace(made.run.config.model, attention_dropout=attention, hidden_dropout=hidden)
        made.run.config = dataclasses.replace(made.run.config, model=model)
        said.clear()
        load._wanted(made.run, Found(tmp_path, 3), {"optimizer_step": 3, "rng_grid": grid})
        whose = "holds no random state that can be used here"
        if grid:
            whose = "was saved by (pipeline, data, tensor) = (3, 2, 5) ranks"
        text = f"{tmp_path} {whose}: dropout goes on from new random numbers"
        assert said == ([text] if rank == 0 and (attention or hidden) else [])


def test_the_flags_of_a_load_reach_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = Found(Path("iter_0000007"), 7), []
    monkeypatch.setattr(load, "search_in", lambda *given: Search(str(given)))
    monkeypatch.setattr(load, "first_whole", lambda search, flags: asked.append((search(), flags)) or (found, []))
    monkeypatch.setattr(load, "load_found", lambda *given: asked.append(given))
    for step in (None, 0, 7):
        made = Made(monkeypatch, ckpt_step=step)
        assert load.load_checkpoint(made.run, "here") == 7
        assert asked == [(Search(str(("here", step))), made.run.config.checkpoint), (made.run, found)]
        asked.clear()
    monkeypatch.setattr(load, "first_whole", lambda search, flags: None)
    assert load.load_checkpoint(Made(monkeypatch).run, "here") is None
