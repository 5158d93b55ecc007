"""Which checkpoint, and whose flags, a replayed step begins from."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.cli.replay_step import main
from megatron_ext.train import replay
from tests.support.small_models import small_config


@pytest.mark.parametrize(
    ("step", "flags_of", "begun"), [(2, 3, 0), (3, 3, 0), (4, 6, 3), (6, 6, 3), (7, 9, 6), (10, 9, 9)]
)
def test_a_step_has_the_flags_of_the_checkpoint_after_it(
    step: int, flags_of: int, begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins with the one before it, and with no other in its place; after the last, with the last one's flags."""
    asked: list[Any] = []
    monkeypatch.setattr(replay, "saved_iterations", lambda folder: [3, 6, 9])
    monkeypatch.setattr(replay, "_flags", lambda folder, iteration: asked.append(iteration) or {})
    monkeypatch.setattr(replay, "configure", lambda words: asked.append(words) or SimpleNamespace(config="config"))
    monkeypatch.setattr(replay, "_steps", lambda *_: [])
    monkeypatch.setattr(replay, "_recorded", lambda path: {})
    assert replay.replay(Path("run"), step).begun == begun
    iteration, words = asked
    assert iteration == flags_of
    loads = ["--load", "run", "--ckpt-step", str(begun), "--no-fallback"] if begun else ["--world-size", "1"]
    assert words[-len(loads) :] == loads


@pytest.mark.parametrize(
    ("words", "recorded", "code"),
    [([], 2.0 + 1e-7, 0), (["--tolerance", "0"], 2.0 + 1e-7, 1), (["--tolerance", "0"], 2.0, 0), ([], None, 1)],
)
def test_no_tolerance_is_one_as_well(
    words: list[str], recorded: float | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing to compare with is no agreement either."""
    step = replay.Step(5, range(16, 20), 2.0, 1.0, recorded, None if recorded is None else 1.0)
    found = replay.Replayed(small_config(), 3, [step], [])
    monkeypatch.setattr(replay, "replay", lambda *_, **__: found)
    assert main(["run", "5", *words]) == code
