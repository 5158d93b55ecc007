"""Everything that a checkpoint or a snapshot holds is written under its own name and put back where it was: no two
values here are equal, and every combination of what is left out is tried."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_ext.checkpoint.local import agreement, rank_state, writer
from megatron_ext.checkpoint.native import contents, load, manifest, optimizer_state
from megatron_ext.checkpoint.native.contents import Contents, Parts
from megatron_ext.checkpoint.native.folder import Found
from megatron_ext.checkpoint.native.resume import Search
from megatron_ext.config.files import to_yaml
from megatron_ext.config.optimizers import traits_of
from megatron_ext.config.schema import CheckpointConfig, OptimizerConfig
from megatron_ext.errors import DataError
from megatron_ext.optim.torch_optimizer import torch_optimizer
from megatron_ext.parallel.rows import RowShard
from megatron_ext.sharding.parts import OnDevice
from megatron_ext.train.state import TrainState
from tests.support.small_models import small_config

YES_NO = (False, True)
FIELDS = [field.name for field in dataclasses.fields(TrainState)]


def _group(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


class Tracker:
    """The engine's generators of dropout."""

    def __init__(self) -> None:
        self.states = {name: torch.tensor([number]) for number, name in enumerate(("tp", "tp-expert", "data"), 10)}

    def get_states(self) -> dict[str, torch.Tensor]:
        return self.states

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states = states


class Made:
    """A run of rank 13 whose parts can be told apart, and what is asked of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **flags: Any) -> None:
        self.asked: list[Any] = []
        self.tracker, self.of_device = Tracker(), torch.tensor([99])
        config = small_config()
        config = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **flags))
        self.state = TrainState(**{name: 11 + number for number, name in enumerate(FIELDS)})  # pyright: ignore
        self.run: Any = SimpleNamespace(
            config=config,
            state=self.state,
            rank=13,
            groups=SimpleNamespace(pp=_group(2, 1), dp_cp=_group(3, 2), tp=_group(5, 4)),
            device=SimpleNamespace(rng_state=lambda: self.of_device, set_rng_state=self._set_rng_state, kind="cpu"),
            optimizer="the optimizer",
            sharding=SimpleNamespace(reload_masters=lambda optimizer: self.asked.append(("masters of", optimizer))),
            data_record={"seed": 7},
        )
        for name, value in {
            "random_tracker": lambda: self.tracker,
            "optimizer_parts": lambda run: ["part"] if run is self.run else None,
            "grad_scaler_state": lambda run: {"scale": 8.0},
            "set_grad_scaler": lambda run, state: self.asked.append(("scaler", state)),
            "_chunks": lambda run: {"model": self._chunk("model"), "model1": self._chunk("model1")},
        }.items():
            monkeypatch.setattr(contents, name, value)
        for name, answer in {"step_count": 6, "set_step_count": None, "restore": None, "take": ["taken"]}.items():
            monkeypatch.setattr(
                contents.optimizer_state,
                name,
                lambda *given, name=name, answer=answer: self.asked.append((name, *given)) or answer,
            )

    def _chunk(self, name: str) -> Any:
        return SimpleNamespace(load_state_dict=lambda state: self.asked.append((name, state)))

    def _set_rng_state(self, state: torch.Tensor) -> None:
        self.of_device = state

    def numbers(self) -> list[int]:
        return [getattr(self.state, name) for name in FIELDS]

    def random(self) -> dict[str, int]:
        return {"": int(self.of_device), **{name: int(state) for name, state in self.tracker.states.items()}}


LOADED = {
    "model": "first chunk",
    "model1": "second chunk",
    "optimizer": "its state",
    "optimizer_step": 5,
    "grad_scaler": "its scale",
    "train_state": {**{name: 101 + number for number, name in enumerate(FIELDS)}, "of another version": 1},
    "rng_state": {
        "dropout": torch.tensor([1]),
        "tracker": {"tp": torch.tensor([2]), "tp-expert": torch.tensor([3]), "data": torch.tensor([4])},
    },
}


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


def _part(config: OptimizerConfig, weights: list[torch.nn.Parameter], *, divides: bool) -> Any:
    made = torch_optimizer(config)([{"params": weights}])
    return SimpleNamespace(
        main_parameters=lambda: [(weight, weight) for weight in weights],
        updater=OnDevice(made),
        saves_master=lambda weight: False,
        rows_to_read=lambda weight: None,
        divides_state=divides,
    )


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "lion"])
def test_state_of_every_optimizer_goes_back_to_its_own_weight(optimizer: str) -> None:
    """Weights of equal shape in two optimizers; one of them is divided, of the other this rank writes one weight."""
    config = OptimizerConfig(optimizer=optimizer, lr=0.1)
    states = traits_of(config).state_names(config)
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(4)]
    parts = [_part(config, weights[:2], divides=False), _part(config, weights[2:], divides=True)]
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
    part = _part(config, weights, divides=False)
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
    part = _part(config, [weight], divides=False)
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


def test_a_snapshot_holds_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives each back, when the tensors are there and what is made of them is made again."""
    made = Made(monkeypatch)
    numbers = rank_state.numbers_of(made.run)
    progress = dict(zip(FIELDS, made.numbers(), strict=True))
    assert numbers == {"state": progress, "optimizer_step": 6, "grad_scaler": {"scale": 8.0}}
    made.asked.clear()
    parts = [
        SimpleNamespace(updater=SimpleNamespace(refresh=lambda number=number: made.asked.append(number)))
        for number in (1, 2)
    ]
    monkeypatch.setattr(contents, "optimizer_parts", lambda run: parts)
    then: Any = {**numbers, "state": LOADED["train_state"], "optimizer_step": 5, "grad_scaler": "its scale"}
    rank_state.set_numbers(made.run, then)
    assert made.numbers() == [101 + number for number in range(len(FIELDS))]
    assert made.asked == [1, 2, ("set_step_count", parts, made.run.config.optimizer, 5), ("scaler", "its scale")]


def test_a_snapshot_holds_every_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(monkeypatch)
    states = {name: state.clone() for name, state in rank_state.random_states(made.run).items()}
    assert {name: int(state) for name, state in states.items()} == {
        "rng": 99, "rng.tp": 10, "rng.tp-expert": 11, "rng.data": 12
    }  # fmt: skip
    before = made.random()
    rank_state.random_states(made.run)["rng.tp"].fill_(0)
    assert made.random() == before, "copies"
    made.tracker.states = {name: torch.zeros(1) for name in ("data", "tp", "tp-expert")}
    made.of_device = torch.zeros(1)
    rank_state.set_random_states(made.run, states)
    assert made.random() == before


def test_tensors_of_a_snapshot_have_names_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two chunks and two optimizers; what lies in another's memory is there once."""
    config = OptimizerConfig(optimizer="adam", lr=0.1)
    chunks, parts, held = [], [], {}
    for number in range(2):
        weights = [torch.nn.Parameter(torch.full((2,), 10.0 * number + index)) for index in range(2)]
        chunk = torch.nn.Module()
        chunk.register_buffer("bias", torch.full((3,), 50.0 + number))
        held[chunk] = [weights[0], None, weights[1]]
        chunks.append(chunk)
        part = _part(config, [torch.nn.Parameter(torch.full((2,), 100.0 + number))], divides=False)
        optimizer_state.initialize_state(part, config)
        [state] = part.updater.torch_optimizers[0].state.values()
        state["exp_avg"].fill_(200.0 + number)
        state["exp_avg_sq"].fill_(300.0 + number)
        parts.append(part)
    parts[1].updater.master_of = lambda main: held[chunks[1]][0]  # a weight of 32 bits is its own master
    sharding = SimpleNamespace(held_weights=lambda chunk: held[chunk])
    run: Any = SimpleNamespace(chunks=chunks, sharding=sharding, config=SimpleNamespace(optimizer=config))
    monkeypatch.setattr(contents, "optimizer_parts", lambda run: parts)
    found = {name: tensor.tolist() for name, tensor in rank_state.tensors_of(run).items()}
    assert {name: values[0] for name, values in found.items()} == {
        "weights.0.0": 0.0, "weights.0.2": 1.0, "weights.1.0": 10.0, "weights.1.2": 11.0,
        "buffers.0.bias": 50.0, "buffers.1.bias": 51.0,
        "optimizer.0.0.exp_avg": 200.0, "optimizer.1.0.exp_avg": 201.0,
        "optimizer.0.0.exp_avg_sq": 300.0, "optimizer.1.0.exp_avg_sq": 301.0,
        "optimizer.0.0.main": 100.0,
    }  # fmt: skip


def _writer(run: Any, contents_name: str | None = "of this run") -> Any:
    made: Any = object.__new__(writer.SnapshotWriter)
    made.run, made._contents, made._follows, made.problem = run, contents_name, (0, None), None
    return made


@pytest.mark.parametrize("record", [None, {"seed": 7}])
def test_the_head_of_a_snapshot_says_all(
    record: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = Made(monkeypatch, save=str(tmp_path))
    made.run.data_record = record
    for step in (9, 10, 30):
        path = tmp_path / f"iter_{step:07d}"
        path.mkdir()
        for name in (".metadata", "metadata.json"):
            (path / name).touch()
        manifest.write(path, {"a": {"bytes": step, "crc32": "0"}})
    one = _writer(made.run)
    for iteration, follows in ((29, 10), (10, 10), (9, 9), (8, 0), (31, 30)):
        assert one._facts(iteration, {"numbers": iteration}) == {
            "iteration": iteration,
            "layout": writer.layout_of(made.run.config),
            "contents": "of this run",
            "checkpoint": follows,
            "manifest": manifest.name_of(tmp_path / f"iter_{follows:07d}") if follows else None,
            "numbers": {"numbers": iteration},
            "config.yaml": to_yaml(made.run.config),
            "data.json": None if record is None else '{"seed": 7}',
        }


def test_what_of_the_layout_a_snapshot_is_bound_to() -> None:
    """Every flag of it, but for those that change neither what a rank holds nor its place."""
    config = small_config()
    free = {"distributed_timeout_minutes", "distributed_backend", "elastic"}
    fields = {field.name for field in dataclasses.fields(config.layout)}
    assert writer.layout_of(config).keys() == (fields - free) | {"optimizer", "params_dtype"}
    for name in sorted(fields):
        other = dataclasses.replace(config, layout=dataclasses.replace(config.layout, **{name: 12345}))
        assert (writer.layout_of(other) == writer.layout_of(config)) == (name in free), name


@pytest.mark.parametrize("size", [2, 8])
def test_how_far_a_copy_goes(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: size)
    for replication, jump, here in itertools.product(YES_NO, (None, 1, 2, 6), (1, 4, 8)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
        flags = SimpleNamespace(replication=replication, replication_jump=jump)
        one = _writer(SimpleNamespace(config=SimpleNamespace(checkpoint=flags)))
        distance = here if jump is None else jump
        assert one._peer_distance() == (distance - size * (distance // size) if replication else 0)


@pytest.mark.parametrize("fails", [None, "the disk is full", OSError(28, "No space left"), RuntimeError("gone")])
def test_a_copy_goes_one_way_round_and_comes_the_other(
    fails: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 5)
    asked: list[Any] = []

    def exchange(*given: Any) -> str | None:
        asked.append(given)
        if isinstance(fails, Exception):
            raise fails
        return fails

    monkeypatch.setattr(writer, "exchange", exchange)
    for rank, to, origin in ((0, 3, 2), (1, 4, 3), (4, 2, 1)):
        one = _writer(SimpleNamespace(rank=rank))
        one.folder, one._jump, one._group = tmp_path, 3, "the group"
        one._copy_to_peer(12, Path("own"))
        target = tmp_path / "iter_0000012" / f"rank_{origin:05d}.copy"
        assert asked.pop() == (Path("own"), to, target, origin, "the group")
        said = f"the copy in another machine failed: {fails}" if isinstance(fails, Exception) else fails
        assert one.problem == said
        one.problem = "an earlier one"
        one._copy_to_peer(12, Path("own"))
        assert one.problem == (said or "an earlier one")
        asked.clear()


def test_when_a_run_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    """Where --load is --save, with all of the newest state."""
    save, other = str(tmp_path / "save"), str(tmp_path / "save2")
    (tmp_path / "link").symlink_to(tmp_path / "save")
    for load_from, step, finetune, no_optim, no_rng in itertools.product(
        (None, save, other, save + "/", str(tmp_path / "link")), (None, 0, 7), YES_NO, YES_NO, YES_NO
    ):
        flags = CheckpointConfig(
            save=save,
            load=load_from,
            ckpt_step=step,
            finetune=finetune,
            no_load_optim=no_optim,
            no_load_rng=no_rng,
        )
        goes_on = load_from not in (None, other) and step is None and not (finetune or no_optim or no_rng)
        assert agreement._goes_on(flags) == goes_on, flags
    assert not agreement._goes_on(CheckpointConfig(load=save))


def test_a_snapshot_is_used_where_every_rank_has_a_file() -> None:
    for ranks in itertools.product(((), (0,), (1,), (0, 1), (2, 0), (1, 2)), repeat=2):
        held: list[dict[int, str]] = [dict.fromkeys(own, "") for own in ranks]
        missing = [rank for rank in range(3) if not any(rank in own for own in ranks)]
        assert agreement._unusable(held, 3) == (f"that of rank {missing[0]} is on no machine" if missing else None)
    assert agreement._unusable([{0: "", 1: "first"}, {2: "second", 10: "third"}], 3) == "first"
    assert agreement._unusable([{0: ""}, {10: "later", 2: "sooner"}], 3) == "sooner"


def test_a_snapshot_is_gone_on_from_with_its_own_flags_and_data(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(agreement.rank_file, "read_header", lambda path: {"config.yaml": str(path), "data.json": "d"})
    asked: list[Any] = []

    def read_resume(found: Found, **named: Any) -> Any:
        asked.append((found, named))
        return agreement.Resume(found.path, found.iteration)

    monkeypatch.setattr(agreement, "read_resume", read_resume)
    path = tmp_path / "iter_0000012"
    path.mkdir()
    for use in YES_NO:
        config = SimpleNamespace(checkpoint=SimpleNamespace(use_checkpoint_args=use))
        made: Any = agreement._resume(tmp_path, 12, config)  # pyright: ignore
        assert asked.pop() == (Found(path, 12), {"use_checkpoint_args": use})
        assert (made.path, made.iteration, made.is_snapshot) == (path, 12, True)
    assert (path / "config.yaml").read_text() == str(path / "rank_00000")
    assert (path / "data.json").read_text() == "d"


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
