"""Everything that a snapshot holds is written under its own name and put back where it was, and a run goes on from one
where all of it is there: no two values here are equal."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.local import agreement, rank_state, writer
from megatron_ext.checkpoint.native import contents, manifest, optimizer_state
from megatron_ext.checkpoint.native.folder import Found
from megatron_ext.config.parse.files import to_yaml
from megatron_ext.config.schema import CheckpointConfig, OptimizerConfig
from tests.support.made_run import FIELDS, LOADED, YES_NO, Made, optimizer_part
from tests.support.small_models import small_config


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
        part = optimizer_part(config, [torch.nn.Parameter(torch.full((2,), 100.0 + number))], divides=False)
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
