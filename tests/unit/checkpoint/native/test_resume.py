"""Whose flags a run goes on with."""

from pathlib import Path
from typing import Any

import pytest

from megatron_ext.checkpoint.native import resume
from megatron_ext.checkpoint.native.checkpoint_folder import SavedCheckpoint
from megatron_ext.checkpoint.native.resume import Search


@pytest.mark.parametrize(("flags", "chosen"), [({}, 1), ({"no_fallback": True}, 3)])
def test_flags_come_from_the_first_whole_checkpoint_unless_it_is_forbidden(
    flags: dict[str, Any], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tuple(SavedCheckpoint(Path(f"iter_{number}"), number, None) for number in (3, 1))
    monkeypatch.setattr(resume, "search_in", lambda folder, step: Search("folder", found))
    monkeypatch.setattr(resume, "_flags_are_intact", lambda path: path.name == "iter_1")
    monkeypatch.setattr(resume, "read_resume", lambda one, use_checkpoint_args: one.iteration)
    search = resume.look({"load": "folder", **flags})
    assert search is not None
    assert search.resume == chosen
