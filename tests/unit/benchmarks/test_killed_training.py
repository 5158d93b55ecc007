"""Kills of a training, without a training: what is compared, when is struck, and what is written down."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import killed_training
from benchmarks.killed_training import Kill, Reference
from benchmarks.launchers import Launcher

ROW = {"iteration": 1, "lm_loss": 4.0, "grad_norm": None, "world_size": 2}
EXPECTED = Reference([ROW, {**ROW, "iteration": 2}], {"a": "0", "b": "1"}, 1.0)


def test_each_difference_to_the_bit_is_named() -> None:
    assert killed_training.differences((EXPECTED.rows, EXPECTED.tensors), EXPECTED) == []
    for rows, tensors, said in (
        ([ROW, {**ROW, "iteration": 2, "lm_loss": 4.0 + 2**-50}], {}, ["row 2: lm_loss 4.0 became 4.000000000000001"]),
        ([ROW], {}, ["2 rows became 1"]),
        ([ROW, {"iteration": 2, "lm_loss": 4.0, "world_size": 2}], {}, ["row 2: grad_norm None became nothing"]),
        ([ROW, {**ROW, "iteration": 2, "more": 1}], {}, ["row 2: more None became 1"]),
        (EXPECTED.rows, {"b": "2"}, ["b of the last checkpoint"]),
        (EXPECTED.rows, {"c": "0"}, ["c of the last checkpoint"]),
    ):
        assert killed_training.differences((rows, {**EXPECTED.tensors, **tensors}), EXPECTED) == said
    assert killed_training.differences((EXPECTED.rows, {"a": "0"}), EXPECTED) == ["b of the last checkpoint"]


class Played(Launcher):
    """A training that logs an iteration whenever it is looked at, and goes on from the last multiple of 3."""

    def __init__(self, folder: Path, ranks: int, end: int, has_agent: bool = False):
        super().__init__([], ranks, folder / "log")
        self.save, self.last, self.has_agent, self.planned = folder / "save", end, has_agent, end
        self.iteration, self.resumed, self.kills = 0, 0, []
        self.typical_start = 0.0
        self.save.mkdir()

    def start(self) -> None:
        pass

    def kill(self, ranks: Any, ranks_then: int) -> int:
        self.kills.append((list(ranks), ranks_then, self.iteration))
        self.iteration = self.resumed = self.iteration // 3 * 3
        self.ranks = ranks_then
        return 1

    def finished(self) -> bool:
        self.iteration = min(self.iteration + 1, self.planned)
        with (self.save / "metrics.jsonl").open("a") as file:
            file.write(f'{{"iteration": {self.iteration}}}\n')
        return self.iteration == self.planned

    def failed(self) -> bool:
        return False

    def end(self) -> None:
        pass

    def resumed_at(self) -> int | None:
        return self.resumed


def strikes(tmp_path: Path, seed: int, ranks: int = 4, sizes: tuple[int, ...] = (4,), agent: bool = False) -> Any:
    launcher = Played(tmp_path, ranks, 40, agent)
    return list(killed_training._strikes(launcher, launcher.save, random.Random(seed), sizes)), launcher.kills


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        killed_training, "time", SimpleNamespace(sleep=lambda _s: None, monotonic=killed_training.time.monotonic)
    )


@pytest.mark.usefixtures("at_once")
def test_kills_of_every_kind_are_written_down(tmp_path: Path) -> None:
    kinds: dict[str, Kill] = {}
    for seed in range(12):
        folder = tmp_path / str(seed)
        folder.mkdir()
        groups, made = strikes(folder, seed, sizes=(2, 4), agent=seed % 2 == 0)
        assert sum(map(len, groups)) == len(made)
        for struck in groups:
            kinds |= {kill.kind: kill for kill in struck}
            assert len(struck) <= {"recovery": 2, "recovery, twice": 3}.get(struck[0].kind, 1)
            assert all(kill.resumed_at is None and kill.seconds is None for kill in struck[:-1]), "the next came before"
            assert struck[-1].at == max(kill.at for kill in struck)
            for kill in struck:
                assert len(kill.ranks) == {"two ranks": 2, "the agent": 0}.get(kill.kind, 1)
                assert kill.late == 1
                assert kill.of in (2, 4)
                assert set(kill.ranks) <= set(range(kill.of or 0))
        resumed = [struck[-1] for struck in groups if struck[-1].resumed_at is not None]
        assert resumed
        assert all(
            kill.resumed_at % 3 == 0 and kill.lost is not None for kill in resumed if kill.resumed_at is not None
        )
    assert set(kinds) == set(killed_training.KINDS)


@pytest.mark.usefixtures("at_once")
def test_one_rank_is_never_two_and_without_an_agent_none_is_killed(tmp_path: Path) -> None:
    seen = set()
    for seed in range(5):
        folder = tmp_path / str(seed)
        folder.mkdir()
        groups, _ = strikes(folder, seed, ranks=1, sizes=(1,))
        seen |= {kill.kind for struck in groups for kill in struck}
    assert seen == set(killed_training.KINDS) - {"two ranks", "the agent"}
