"""What of a checkpoint is put back, by the flags; what of its optimizer counts; and which checkpoints may go."""

import dataclasses
import shlex
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron_ext.checkpoint.native import contents, load, optimizer_state, retention, saved_rows
from megatron_ext.checkpoint.native.contents import Contents, Parts
from megatron_ext.checkpoint.native.folder import Found
from megatron_ext.checkpoint.native.saved_rows import joined
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config, OptimizerConfig
from megatron_ext.errors import DataError
from megatron_ext.optim.torch_optimizer import torch_optimizer
from megatron_ext.parallel.rows import RowShard
from megatron_ext.train.state import TrainState
from tests.support.small_models import small_config
from tests.support.wrong_flags import BASE

ALL = Parts(optimizer=True, rng=True, progress=True)
GRID = [1, 2, 4]


def _run(**flags: Any) -> Any:
    config = small_config()
    return SimpleNamespace(
        config=dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, **flags)),
        groups=SimpleNamespace(
            **{
                name: SimpleNamespace(size=lambda size=size: size)
                for name, size in zip(("pp", "dp_cp", "tp"), GRID, strict=True)
            }
        ),
        rank=0,
    )


@pytest.mark.parametrize(
    ("flags", "common", "expected"),
    [
        ({}, {}, ALL),
        ({"finetune": True}, {}, Parts(optimizer=False, rng=False, progress=False)),
        ({"no_load_optim": True}, {}, dataclasses.replace(ALL, optimizer=False)),
        ({"no_load_rng": True}, {}, dataclasses.replace(ALL, rng=False)),
        ({}, {"rng_grid": [1, 4, 2]}, dataclasses.replace(ALL, rng=False)),
        ({}, {"rng_grid": None}, dataclasses.replace(ALL, rng=False)),
        ({}, {"weights_only": True}, Parts(optimizer=False, rng=False, progress=False)),
    ],
)
def test_what_the_flags_want_of_what_is_there(
    flags: dict[str, Any], common: dict[str, Any], expected: Parts, tmp_path: Path
) -> None:
    there = {"optimizer_step": 3, "rng_grid": GRID, **common}
    assert load._wanted(_run(**flags), Found(tmp_path, 5), there) == expected
    released = Found(tmp_path / "release", 0)
    assert load._wanted(_run(**flags), released, there) == Parts(optimizer=False, rng=False, progress=False)


@pytest.mark.parametrize(("dropout", "told"), [({}, False), ({"hidden_dropout": 0.1}, True)])
def test_new_random_numbers_are_told_of_where_there_is_dropout(
    dropout: dict[str, float], told: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run()
    plain = dataclasses.replace(run.config.model, attention_dropout=0.0, hidden_dropout=0.0)
    run.config = dataclasses.replace(run.config, model=dataclasses.replace(plain, **dropout))
    there = {"optimizer_step": 3, "rng_grid": [1, 4, 2]}
    assert not load._wanted(run, Found(tmp_path, 5), there).rng
    said = capsys.readouterr()
    assert ("dropout goes on from new random numbers" in said.out + said.err) == told


def test_a_state_that_is_not_there_is_missed_where_it_is_wanted(tmp_path: Path) -> None:
    found, there = Found(tmp_path, 5), {"rng_grid": GRID}
    with pytest.raises(DataError, match="was saved without optimizer state"):
        load._wanted(_run(), found, there)
    assert not load._wanted(_run(no_load_optim=True), found, there).optimizer


class Restored:
    """A run into which a checkpoint of iteration 9 is read, and what is done to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32", rows: Any = None) -> None:
        self.heard: list[Any] = []
        chunk = SimpleNamespace(load_state_dict=lambda state: self.heard.append(("weights", state)))
        tracker = SimpleNamespace(set_states=lambda states: self.heard.append(("tracker", states)))
        monkeypatch.setattr(contents, "_chunks", lambda run: {"model": chunk})
        monkeypatch.setattr(contents, "_dtype", lambda run: getattr(torch, dtype))
        monkeypatch.setattr(contents, "random_tracker", lambda: tracker)
        monkeypatch.setattr(contents, "optimizer_parts", lambda run: "parts")
        monkeypatch.setattr(contents, "set_grad_scaler", lambda run, state: self.heard.append(("scaler", state)))
        for name in ("restore", "set_step_count"):
            monkeypatch.setattr(
                contents.optimizer_state, name, lambda *given, name=name: self.heard.append((name, given[-1]))
            )
        self.run: Any = SimpleNamespace(
            config=small_config(),
            state=TrainState(scheduled_samples=77),
            optimizer="optimizer",
            sharding=SimpleNamespace(reload_masters=lambda optimizer: self.heard.append("masters")),
            device=SimpleNamespace(set_rng_state=lambda state: self.heard.append(("dropout", state))),
        )
        self.contents = Contents({}, {}, {}, rows or {})

    def restore(self, parts: Parts) -> list[Any]:
        """Return what is done, in its order."""
        loaded = {
            "model": {"weight": {"0": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}} if self.contents.rows else "the model",
            "optimizer": "its state",
            "optimizer_step": 6,
            "grad_scaler": "its scale",
            "train_state": {"iteration": 9, "consumed_samples": 36, "scheduled_samples": 24, "of another version": 1},
            "rng_state": {"dropout": "of dropout", "tracker": "of regions"},
        }
        contents.restore(self.run, self.contents, parts, loaded)
        return self.heard


OPTIMIZER = [("restore", "its state"), ("set_step_count", 6), ("scaler", "its scale")]
RANDOM = [("dropout", "of dropout"), ("tracker", "of regions")]


def test_all_that_a_checkpoint_holds_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Restored(monkeypatch)
    assert made.restore(ALL) == [("weights", "the model"), *OPTIMIZER, *RANDOM]
    assert (made.run.state.iteration, made.run.state.consumed_samples, made.run.state.scheduled_samples) == (9, 36, 24)


def test_without_the_optimizer_masters_follow_the_weights_and_its_curves_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Restored(monkeypatch)
    assert made.restore(dataclasses.replace(ALL, optimizer=False)) == [("weights", "the model"), "masters", *RANDOM]
    assert (made.run.state.iteration, made.run.state.scheduled_samples) == (9, 0)
    made = Restored(monkeypatch)
    assert made.restore(Parts(optimizer=False, rng=False, progress=False)) == [("weights", "the model"), "masters"]
    assert (made.run.state.iteration, made.run.state.scheduled_samples) == (0, 77)


@pytest.mark.parametrize(("dtype", "optimizer"), [("float32", True), ("bfloat16", True), ("bfloat16", False)])
def test_rows_come_with_the_optimizer_where_weights_are_rounded(
    dtype: str, optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a weight are its fp32 master; a checkpoint has the weight as the forward pass has it."""
    shard = RowShard(torch.zeros(2, 2), 1, (5, 2), None)
    made = Restored(monkeypatch, dtype, {"model.weight": shard})
    state = [OPTIMIZER[0], "masters", *OPTIMIZER[1:]] if optimizer else ["masters"]
    assert made.restore(dataclasses.replace(ALL, optimizer=optimizer, rng=False)) == state
    with_optimizer = optimizer and dtype == "bfloat16"
    assert shard.local.tolist() == ([[0.0, 0.0]] * 2 if with_optimizer else [[1.0, 2.0], [3.0, 4.0]])


def test_pieces_are_joined_by_their_numbers() -> None:
    pieces = {str(number): torch.full((1, 1, 2), float(number)) for number in (10, 9, 2)}
    shard = RowShard(torch.zeros(3, 2), 0, (3, 2), None)
    assert joined(shard, pieces).tolist() == [[2.0, 2.0], [9.0, 9.0], [10.0, 10.0]]


ADAM = OptimizerConfig(optimizer="adam", lr=0.1)


@pytest.mark.parametrize("count", [0, 6])
def test_every_parameter_counts_its_own_updates(count: int) -> None:
    """From zero, too: a run that goes back to its beginning has made none."""
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    made = torch_optimizer(ADAM)([{"params": weights}])
    part: Any = SimpleNamespace(updater=SimpleNamespace(torch_optimizers=[made]))
    optimizer_state.initialize_state(part, ADAM)
    for weight in weights:
        made.state[weight]["step"].fill_(2.0)
    optimizer_state.set_step_count([part], ADAM, count)
    steps = [made.state[weight]["step"] for weight in weights]
    assert steps[0] is not steps[1]
    assert [step.item() for step in steps] == [float(count)] * 2
    assert optimizer_state.step_count([part]) == count


@pytest.mark.parametrize(("fused", "capturable"), [(True, False), (False, True), (False, False)])
def test_the_count_lies_where_the_kernel_reads_it(fused: bool, capturable: bool) -> None:
    main = torch.empty(2, device="meta")
    made = SimpleNamespace(state={main: {}}, param_groups=[])
    group = {"params": [main], "fused": fused, "capturable": capturable}
    adam: Any = torch_optimizer(ADAM)([{"params": [torch.nn.Parameter(torch.ones(1))]}])
    optimizer_state._begin(made.state[main], main, group, adam, ADAM)
    assert made.state[main]["step"].device.type == ("meta" if fused or capturable else "cpu")
    assert {name: tensor.dtype for name, tensor in made.state[main].items()} == dict.fromkeys(
        ("exp_avg", "exp_avg_sq", "step"), torch.float32
    )


def test_what_was_read_reaches_what_updates() -> None:
    """Tensors first, then what is made of them."""
    weight = torch.nn.Parameter(torch.zeros(2))
    state = {"exp_avg": torch.zeros(2), "exp_avg_sq": torch.zeros(0)}
    refreshed: list[list[float]] = []
    part: Any = SimpleNamespace(
        main_parameters=lambda: [(weight, weight)],
        updater=SimpleNamespace(
            updated_by=lambda main: (SimpleNamespace(state={weight: state}), weight),
            refresh=lambda: refreshed.append(state["exp_avg"].tolist()),
        ),
        saves_master=lambda parameter: False,
        rows_to_read=lambda parameter: None,
    )
    optimizer_state.restore([part], ADAM, {id(weight): "w"}, {"exp_avg": {"w": torch.tensor([1.0, 2.0])}})
    assert refreshed == [[1.0, 2.0]]


@pytest.mark.parametrize(
    ("saved", "newest", "keep_last", "interval", "gone"),
    [
        ([10, 20, 30], 30, None, None, []),
        ([30, 10, 20], 30, 2, None, [10]),
        ([10, 20, 30], 30, 1, None, [10, 20]),
        ([10, 20, 30], 20, 1, None, [10]),
        ([10, 20, 30], 30, None, 20, [10]),
        ([10, 20, 30, 40], 40, 1, 20, [10, 30]),
    ],
)
def test_which_checkpoints_may_go(
    saved: list[int], newest: int, keep_last: int | None, interval: int | None, gone: list[int]
) -> None:
    assert retention.expired(saved, newest, keep_last, interval) == gone


@pytest.mark.parametrize(("problems", "removed"), [([], [10]), (["__0_0.distcp is missing"], []), (None, [])])
def test_earlier_checkpoints_go_when_the_newest_is_whole(
    problems: list[str] | None, removed: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By its manifest, which must be there; one that somebody has put elsewhere stays."""
    gone: list[int] = []
    said: list[str] = []
    for name, value in {
        "saved_iterations": lambda folder: [5, 10, 20],
        "_is_link": lambda folder, iteration: iteration == 5,
        "damage": lambda path: problems if path.name == "iter_0000020" else ["of another"],
        "remove": lambda folder, iteration: gone.append(iteration),
        "warn": said.append,
    }.items():
        monkeypatch.setattr(retention, name, value)
    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda answer, src: None)
    retention.remove_expired(_run(keep_last_checkpoints=1), tmp_path, 20)
    assert gone == removed
    assert len(said) == (0 if removed else 1)
    (tmp_path / "iter_0000010").symlink_to(tmp_path)
    monkeypatch.undo()
    assert retention._is_link(tmp_path, 10)
    assert not retention._is_link(tmp_path, 20)


def _saved(rows: int, columns: int, first: int, of: int) -> ShardedTensor:
    """Rows of a tensor of `of` rows in a checkpoint, from `first` on."""
    data = torch.zeros(rows, columns, dtype=torch.bfloat16)
    return replace(
        ShardedTensor.from_rank_offsets("weight", data, replica_id=(0, 1, 2)),
        global_shape=(of, columns),
        global_offset=(first, 0),
        axis_fragmentations=None,
    )


def test_rows_of_several_tensors_are_saved_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of six rows is rows 4 to 6 of one tensor and 20 to 22 of another; this rank has its rows 1 to 4."""
    monkeypatch.setattr(saved_rows, "_parts", lambda weight: [_saved(3, 2, 4, 10), _saved(3, 2, 20, 30)])
    rows = torch.arange(8.0).view(4, 2)
    found = saved_rows.pieces("weight", RowShard(rows, 1, (6, 2), None, replica=3), rows, "state")  # pyright: ignore
    assert [
        (piece.key, piece.global_offset, torch.as_tensor(piece.data).tolist(), piece.dtype) for piece in found.values()
    ] == [
        ("state", (5, 0), [[0.0, 1.0], [2.0, 3.0]], torch.float32),
        ("state", (20, 0), [[4.0, 5.0], [6.0, 7.0]], torch.float32),
    ]
    assert {piece.replica_id for piece in found.values()} == {(0, 1, 3)}


def test_state_is_saved_as_its_weight_is_cut_in_its_own_type() -> None:
    weight = _saved(3, 2, 4, 10)
    state = {"exp_avg": torch.ones(3, 2)}
    key = id(weight.data)
    found: Any = optimizer_state._like_weights({key: state}, {"w": weight, "another": _saved(1, 1, 0, 1)}, {key: None})
    assert list(found) == ["exp_avg"]
    [(name, made)] = found["exp_avg"].items()
    assert (name, made.key, made.dtype, made.global_offset) == (
        "w", "optimizer.state.exp_avg.weight", torch.float32, (4, 0)
    )  # fmt: skip
    assert made.data is state["exp_avg"]
    assert optimizer_state._written_by(weight, 3, 1).replica_id == (0, 1, 2), "written by the rank of the replica"


def test_who_only_evaluates_needs_no_optimizer() -> None:
    def resolved(flags: str) -> Config:
        return resolve(parse(shlex.split(f"{BASE} {flags}")).values, Facts())

    assert resolved("--skip-train").checkpoint.no_load_optim
    assert not resolved("").checkpoint.no_load_optim


def test_what_a_rank_writes_is_what_it_counts() -> None:
    """In bytes; of tensors that several ranks hold, those that are its own to write."""
    own, others = (replace(_saved(3, 2, 0, 3), replica_id=(0, 0, replica)) for replica in (0, 1))
    state: Any = {"model": {"a": own, "b": others}, "optimizer": {"c": own, "d": replace(own, data=None)}, "step": 3}
    assert contents.size(state) == 2 * 3 * 2 * 2


def test_those_that_hold_the_same_write_about_as_much() -> None:
    """The largest first, each to who has least; experts among the ranks that hold the same experts."""
    expert: Any = torch.zeros(9)
    expert.allreduce = False
    tensors = {"small": torch.zeros(2), "large": torch.zeros(6), "middle": torch.zeros(4), "expert": expert}
    weights: Any = {name: SimpleNamespace(data=data, replica_id=(0, 1)) for name, data in tensors.items()}
    models = Contents({}, weights, {}, {})

    class Group(tuple[int, ...]):
        """Ranks that hold the same."""

        def size(self) -> int:
            return len(self)

    run: Any = SimpleNamespace(groups=SimpleNamespace(dp_cp=Group((0, 1, 2)), expt_dp=Group((0, 1))))
    contents._spread(models, run)
    # Ranks 0, 1 and 2 write large, middle and small, where this is rank 1; of the experts rank 0 does.
    assert {name: weight.replica_id for name, weight in weights.items()} == {
        "large": (0, 1), "middle": (0, 0), "small": (0, 2), "expert": (0, 1)
    }  # fmt: skip
    assert models.replicas == dict.fromkeys(tensors, 1)


@pytest.mark.parametrize(
    ("rows", "of_the_run", "again"), [(False, True, False), (False, False, True), (True, True, True)]
)
def test_modules_are_asked_again_where_their_tensors_are_others(
    rows: bool, of_the_run: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was made for an earlier save's state dict holds the numbers of then."""
    shard: Any = {"w": RowShard(torch.zeros(1), 0, (1,), None)} if rows else {}
    kept, new = Contents({}, {}, {}, shard), Contents({}, {}, {}, {})
    monkeypatch.setattr(contents, "models_of", lambda run: new)
    monkeypatch.setattr(contents, "_of_the_run", lambda models, run: of_the_run)
    run = _run(no_save_optim=True, no_save_rng=True)
    run.state = TrainState(iteration=5)
    taken = contents.take(run, lambda name, tensor: tensor, kept)
    assert (taken.models is new) == again
    assert taken.others["iteration"] == 5
    assert contents.take(run, lambda name, tensor: tensor).models is new
