"""The record of why a run ended: the first cause stays, and what one rank said is no cause of its own."""

import json
from collections.abc import Callable
from pathlib import Path

from megatron_ext.resilience import exit_record


def test_the_first_cause_stays_until_the_next_start(tmp_path: Path) -> None:
    for code, message in ((65, "rank 0: first"), (70, "rank 0: second")):
        exit_record.write(tmp_path / "new", code=code, rank=0, message=message, iteration=None)
    record = json.loads((tmp_path / "new" / "exit.json").read_text())
    assert record.pop("time").endswith("+00:00")
    assert record == {"code": 65, "rank": 0, "message": "rank 0: first", "iteration": None}
    for _ in range(2):
        exit_record.clear(tmp_path / "new")
        assert list((tmp_path / "new").iterdir()) == []


def test_a_record_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for save in (None, tmp_path / "file", tmp_path / "file" / "below"):
        exit_record.write(save, code=1, rank=0, message="m", iteration=None)
        assert not exit_record.is_there(save)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_rank_told_its_launcher_is_no_cause_of_another(tmp_path: Path, attempt: Callable[..., Path]) -> None:
    exit_record.tell_launcher("nobody hears it")
    other, own = (attempt(tmp_path, 0, rank) for rank in (1, 0))
    exit_record.tell_launcher("rank 0: lost")
    told = json.loads(own.read_text())["message"]
    assert (told["message"], told["extraInfo"]["timestamp"].isdecimal()) == ("rank 0: lost", True)
    assert not exit_record.wait_for_another(None, 0.0)
    other.touch()
    assert exit_record.wait_for_another(None, 0.0)
