"""What an attempt finds of those before it, under torchrun's names of folders."""

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.errors import StoppedBySignal
from megatron_ext.resilience import launcher

Attempt = Callable[..., Path]


def test_a_stop_holds_for_all_later_attempts_of_the_launch(attempt: Attempt, tmp_path: Path):
    attempt(tmp_path / "a", 1)
    assert not launcher.stopped_before()
    launcher.remember_stop(75, "stopped at iteration 7: SIGTERM")
    for restart in (2, 3):
        attempt(tmp_path / "a", restart, local_rank=1)
        with pytest.raises(StoppedBySignal, match=rf"^stopped at iteration 7: SIGTERM \(restart {restart} of this"):
            launcher.stopped_before()
    attempt(tmp_path / "b", 2)  # another launch
    assert not launcher.stopped_before()


def test_a_stop_with_exit_code_0_ends_later_attempts_with_0(attempt: Attempt, tmp_path: Path):
    attempt(tmp_path, 0)
    launcher.remember_stop(0, "--exit-interval 7")
    attempt(tmp_path, 1)
    assert launcher.stopped_before()


def test_attempts_are_counted_as_numbers(attempt: Attempt, tmp_path: Path):
    attempt(tmp_path, 9)
    launcher.remember_stop(0, "--exit-interval 7")
    attempt(tmp_path, 10)
    assert launcher.stopped_before()


def test_ranks_that_torchrun_stops_for_a_new_machine_go_on(attempt: Attempt, tmp_path: Path):
    """It sends SIGTERM, so that they save and end with 75, but counts no restart."""
    attempt(tmp_path, 1)
    launcher.remember_request("SIGTERM")
    launcher.remember_stop(75, "stopped")
    assert not launcher.stopped_before()
    assert launcher.requested_before() is None


def test_a_request_that_was_not_fulfilled_reaches_the_next_attempt(attempt: Attempt, tmp_path: Path):
    attempt(tmp_path, 0)
    launcher.remember_request("the file stop")
    attempt(tmp_path, 1)
    assert not launcher.stopped_before()
    assert launcher.requested_before() == "the file stop"


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"attempt": "x"}', '{"attempt": null}', "\xff"])
def test_a_damaged_record_is_none(content: str, attempt: Attempt, tmp_path: Path):
    attempt(tmp_path, 1)
    for name in ("stopped.json", "stop_asked.json"):
        (tmp_path / name).write_text(content, encoding="latin-1")
    assert not launcher.stopped_before()
    assert launcher.requested_before() is None


@pytest.mark.parametrize("error_file", [None, "", "error.json"])
def test_without_a_folder_of_the_launch_nothing_is_remembered(
    error_file: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    if error_file is not None:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", error_file)
    launcher.remember_stop(75, "stopped")
    assert not launcher.stopped_before()
    assert list(tmp_path.iterdir()) == []
