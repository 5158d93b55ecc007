"""Kills of a training, without a training: what is compared, when is struck, and what launchers do with processes."""

import contextlib
import math
import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import killed_training, launchers
from benchmarks.killed_training import CASES, VARIANTS, Kill, Reference, Trial, combinations, words
from benchmarks.launchers import ForkedRanks, Launcher, Torchrun

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


def test_what_is_stuck_is_told_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Played(tmp_path, 2, 5)
    launcher.log.write_text("what the ranks said")
    monkeypatch.setattr(Played, "failed", lambda _self: True)
    with pytest.raises(killed_training.StuckError, match="the run does not go on:\nwhat the ranks said"):
        killed_training._wait(lambda: False, launcher)
    monkeypatch.setattr(Played, "failed", lambda _self: False)
    clock = iter(range(0, 10_000, 100))
    monkeypatch.setattr(killed_training, "time", SimpleNamespace(sleep=lambda _s: None, monotonic=lambda: next(clock)))
    with pytest.raises(killed_training.StuckError):
        killed_training._wait(lambda: False, launcher)
    assert next(clock) == 400, "at 0 it began to say nothing; looked at every 100 seconds, that is more than 240 at 300"
    killed_training._wait(lambda: True, launcher)


# Launchers.


class Process:
    """A process that ends by SIGTERM after some seconds, or never."""

    def __init__(self, needs: float | None):
        self.needs, self.exitcode, self.calls = needs, None, []

    def terminate(self) -> None:
        self.calls.append("terminate")

    def kill(self) -> None:
        self.calls.append("kill")
        self.exitcode = -9 if self.exitcode is None else self.exitcode

    def join(self, seconds: float | None = None) -> None:
        self.calls.append("join")
        if self.exitcode is None and self.needs is not None and (seconds is None or self.needs <= seconds):
            self.exitcode = -15


def test_all_are_told_to_end_before_one_is_waited_for() -> None:
    processes = [Process(1.0), Process(None), Process(9.0)]
    assert launchers._terminated(processes, 5.0) == [-15, None, None]
    assert all(process.calls == ["terminate", "join"] for process in processes)


def forked(tmp_path: Path, processes: list[Any], monkeypatch: pytest.MonkeyPatch) -> ForkedRanks:
    launcher = ForkedRanks(["--save", "a{rank}"], len(processes), tmp_path / "folder" / "log")
    launcher._processes = processes
    started: list[Any] = []

    class Started(Process):
        def __init__(self, target: Any, args: Any, daemon: bool):
            super().__init__(None)
            self.args = args
            started.append(self)

        def start(self) -> None:
            pass

    monkeypatch.setattr(launchers, "forkserver", lambda: SimpleNamespace(Process=Started))
    return launcher


def test_killed_ranks_lose_their_machine_and_all_start_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [Process(0.0), Process(None), Process(0.0)]
    launcher = forked(tmp_path, processes, monkeypatch)
    launcher.lost_with_rank = f"{tmp_path}/memory{{rank}}"
    for rank in range(3):
        (tmp_path / f"memory{rank}").mkdir()
    launcher.log.write_text("checkpoint: starting afresh\n")
    assert launcher.resumed_at() == 0
    assert launcher.kill([2], 2) == 1, "rank 1 did not end in time"
    assert sorted(os.listdir(tmp_path)) == ["folder", "memory0", "memory1"]
    assert processes[2].calls[:2] == ["kill", "join"]
    assert "terminate" not in processes[2].calls
    assert [process.exitcode for process in processes] == [-15, -9, -9]
    assert launcher.ranks == len(launcher._processes) == 2
    assert launcher._processes[1].args[1] == ["--save", "a1"]
    assert launcher._processes[1].args[2] == str(launcher.log)
    assert launcher.resumed_at() is None, "what the last attempt said does not count"
    with launcher.log.open("a") as log:
        log.write("checkpoint: resuming at iteration 12\ncheckpoint: resuming at iteration 15\n")
    assert launcher.resumed_at() == 12


def test_ranks_are_on_one_machine_or_each_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = forked(tmp_path, [Process(0.0)] * 3, monkeypatch)
    here = launcher._settings(2)
    keys = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR")
    assert [here[key] for key in keys] == ["2", "3", "2", "3", "True", "127.0.0.1"]
    assert int(here["MASTER_PORT"]) == launcher._store.port
    launcher.lost_with_rank = "x"
    assert [launcher._settings(2)[key] for key in keys] == ["2", "3", "0", "1", "True", "127.0.0.1"]


def test_finished_is_all_at_0_and_failed_any_other_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = forked(tmp_path, [Process(0.0), Process(0.0)], monkeypatch)
    for codes, finished, failed in (
        ((None, None), False, False),
        ((0, None), False, False),
        ((0, 0), True, False),
        ((0, 64), False, True),
        ((None, -9), False, True),
    ):
        for process, code in zip(launcher._processes, codes, strict=True):
            process.exitcode = code
        assert (launcher.finished(), launcher.failed()) == (finished, failed), codes


def test_torchrun_has_ended_well_at_0_alone(tmp_path: Path) -> None:
    launcher = Torchrun([], 2, tmp_path / "log")
    assert (launcher.finished(), launcher.failed(), launcher.has_agent) == (False, False, True)
    for code, finished, failed in ((None, False, False), (0, True, False), (1, False, True), (-9, False, True)):
        launcher._agent = SimpleNamespace(poll=lambda code=code: code)  # pyright: ignore[reportAttributeAccessIssue]
        assert (launcher.finished(), launcher.failed()) == (finished, failed)


def test_torchruns_ranks_are_killed_by_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher: Any = Torchrun([], 3, tmp_path / "log")
    killed: list[int] = []
    ranks = {rank: SimpleNamespace(kill=lambda rank=rank: killed.append(rank)) for rank in range(3)}
    launcher._agent = SimpleNamespace(pid=1, kill=lambda: killed.append(-1), wait=lambda: None)
    launcher._rank_processes = lambda: ranks
    launcher.end = launcher.start = lambda: killed.append(99)
    monkeypatch.setattr(launchers.psutil, "wait_procs", lambda processes, timeout: (processes[:1], processes[1:]))
    launcher.log.write_text("checkpoint: resuming at iteration 3\n")
    assert (launcher.kill([2, 0], 3), killed) == (2, [2, 0])
    assert launcher.resumed_at() is None
    killed.clear()
    assert (launcher.kill([], 3), killed) == (2, [-1, 1, 2, 99, 99]), "the agent, who is late, and a new start"
    killed.clear()
    del ranks[1]
    assert (launcher.kill([1], 3), killed) == (1, [-1, 2, 99, 99]), "no such rank is there yet: the agent"
    with contextlib.suppress(AssertionError):
        launcher.kill([0], 2)
        pytest.fail("torchrun starts as many as before")


def test_the_end_of_a_log_is_its_last_characters(tmp_path: Path) -> None:
    launcher = Played(tmp_path, 1, 1)
    launcher.log.write_bytes(b"x" * 5000 + b"\xffend")
    assert len(launcher.end_of_log()) == 4000
    assert launcher.end_of_log().endswith("\ufffdend")
