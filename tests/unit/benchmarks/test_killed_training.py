"""Kills of a training, without a training: what is compared, when is struck, and what is written down."""

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import killed_training
from benchmarks.killed_training import CASES, VARIANTS, Kill, Reference, Trial, combinations, words
from benchmarks.launchers import Launcher

ROW = {"iteration": 1, "lm_loss": 4.0, "grad_norm": None, "world_size": 2}
EXPECTED = Reference([ROW, {**ROW, "iteration": 2}], {"a": "0", "b": "1"}, 1.0)


def test_two_metrics_are_apart_by_their_larger_one() -> None:
    assert killed_training._apart(4.0, 5.0) == 0.2 == killed_training._apart(5.0, 4.0)
    assert killed_training._apart(-4.0, 4.0) == 2.0
    assert killed_training._apart(0.0, 0.0) == 0.0 == killed_training._apart("x", "x")
    for before, after in ((4.0, math.nan), (math.nan, 4.0), (4.0, None), (None, 4.0), (1, 2), (4.0, 4)):
        assert killed_training._apart(before, after) == (0.0 if before == after else math.inf)


def test_the_largest_difference_is_over_all_rows_and_metrics() -> None:
    rows = [{**ROW, "lm_loss": 4.0 * (1 + 5e-7)}, {**ROW, "lm_loss": 4.0 * (1 + 2e-7), "world_size": 1}]
    largest, found = killed_training.largest_difference(rows, [ROW, ROW])
    assert (largest, found) == (pytest.approx(5e-7, rel=1e-6), [])
    assert killed_training.largest_difference([{**ROW, "lm_loss": 4.000008}], [ROW])[1] == [
        "row 1: lm_loss 4.0 became 4.000008"
    ]
    assert killed_training.largest_difference([{**ROW, "lm_loss": math.nan}], [ROW]) == (
        math.inf,
        ["row 1: lm_loss 4.0 became nan"],
    )


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


def test_launchers_run_what_they_can_kill() -> None:
    """torchrun starts as many ranks as before, on one machine; a machine of its own needs a second one."""
    forked, by_agent = set(combinations("forkserver")), set(combinations("torchrun"))
    every = {(layout, variant) for layout in CASES for variant in VARIANTS}
    elastic = {(layout, "elastic") for layout, case in CASES.items() if case.smaller}
    own = {(layout, "snapshots, lost machines") for layout in CASES}
    both = {pair for pair in every if not VARIANTS[pair[1]].elastic and not VARIANTS[pair[1]].own_machines}
    assert by_agent == both
    assert forked == both | elastic | (own - {("one rank", "snapshots, lost machines")})
    assert ("DP2", "elastic") in forked
    assert ("TP2", "elastic") not in forked


def test_a_training_saves_to_and_loads_from_its_folder(tmp_path: Path) -> None:
    found = words(CASES["PP2"], VARIANTS["snapshots, lost machines"], tmp_path, 7)
    for flag, value in (
        ("--save", f"{tmp_path}/save"),
        ("--load", f"{tmp_path}/save"),
        ("--train-iters", "7"),
        ("--non-persistent-local-ckpt-dir", f"{tmp_path}/memory{{rank}}"),
        ("--pipeline-model-parallel-size", "2"),
    ):
        assert found[found.index(flag) + 1] == value
    assert found.index("--save-interval", found.index("--save-interval") + 1), "the variant's interval wins"


def test_steps_lost_are_those_between_the_kill_and_the_resumption() -> None:
    assert Kill("a step", [0], 9).lost is None
    assert Kill("a step", [0], 9, resumed_at=6).lost == 3
    assert Kill("a step", [0], 9, resumed_at=12).lost == 0
    assert Trial("a", "b", "c", seed=3).as_row()["seed"] == 3


def test_the_summary_has_the_middle_and_the_tail_of_the_seconds() -> None:
    kills = [Kill("a step", [0], 9, 9, float(seconds)) for seconds in range(21, 0, -1)]
    found = killed_training.summary([Trial("DP2", "save", "forkserver", kills=kills).as_row()])
    assert found["seconds_to_resume"] == {"median": 11.0, "95th percentile": 20.0, "longest": 21.0}
    assert found["goodput"] is None


def test_the_last_iteration_is_that_of_the_last_whole_line(tmp_path: Path) -> None:
    assert killed_training.last_iteration(tmp_path) == 0
    metrics = tmp_path / "metrics.jsonl"
    for text, last in (("", 0), ('{"iter', 0), ('{"iteration": 3}\n', 3), ('{"iteration": 3}\n{"iteration": 4', 3)):
        metrics.write_text(text)
        assert killed_training.last_iteration(tmp_path) == last


def test_a_save_is_in_progress_under_a_name_that_is_not_yet_its_own(tmp_path: Path) -> None:
    assert not killed_training._saves(tmp_path / "nowhere")
    (tmp_path / "iter_0000003").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    assert not killed_training._saves(tmp_path)
    (tmp_path / ".iter_0000006.part").mkdir()
    assert killed_training._saves(tmp_path)


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


def test_the_end_of_a_log_is_its_last_characters(tmp_path: Path) -> None:
    launcher = Played(tmp_path, 1, 1)
    launcher.log.write_bytes(b"x" * 5000 + b"\xffend")
    assert len(launcher.end_of_log()) == 4000
    assert launcher.end_of_log().endswith("\ufffdend")
