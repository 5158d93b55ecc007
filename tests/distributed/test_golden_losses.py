"""The losses of a few layouts are those of tests/golden/losses, to the bit on the machine that wrote them."""

import json
from pathlib import Path

import pytest

from tests.support.losses import golden, layouts
from tests.support.losses.commits import ROOT, scratch_folder
from tests.support.losses.run import run_job

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "losses"


def newest(folder: Path) -> Path:
    """The file of the newest torch, for one that has none of its own."""
    return max(folder.iterdir(), key=lambda path: tuple(map(int, path.stem.removeprefix("torch-").split("."))))


def trained_here(monkeypatch: pytest.MonkeyPatch) -> golden.Losses:
    """As `golden.train`, whose process of its own loads everything anew."""
    with scratch_folder() as scratch:
        monkeypatch.chdir(scratch)
        return {name: golden.losses_of(run_job(str(ROOT), job)) for name, job in layouts.golden_jobs().items()}


def test_losses_are_the_golden_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    own = golden.file_for(FOLDER)
    kept = json.loads((own if own.exists() else newest(FOLDER)).read_text())
    expected = kept.pop("losses")
    tolerance = 0.0 if kept == golden.here() else golden.TOLERANCE
    assert list(golden.differences(expected, trained_here(monkeypatch), tolerance)) == []


def test_one_bit_is_a_difference() -> None:
    one, other = ({"FSDP2": {"lm_loss": [number.hex()]}} for number in (5.5, 5.5 + 2**-50))
    assert list(golden.differences(one, other, 1e-6)) == []
    assert list(golden.differences(one, other, 0.0)) == [
        "FSDP2: number 1 of lm_loss is 0x1.6000000000000p+2 and 0x1.6000000000001p+2 (5.5 and 5.500000000000001)"
    ]


def test_a_missing_number_and_nan_are_differences() -> None:
    one = {"FSDP2": {"lm_loss": [(5.5).hex(), (5.25).hex()]}}
    assert list(golden.differences(one, {"FSDP2": {"lm_loss": [(5.5).hex()]}}, 1e-6)) != []
    assert list(golden.differences(one, {"FSDP2": {"lm_loss": [(5.5).hex(), "nan"]}}, 1e-6)) != []
