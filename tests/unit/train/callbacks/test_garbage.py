"""--manual-gc: at which steps of a real small run Python's garbage is collected, and what is left as it was."""

import gc
from typing import Any

import pytest

from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback
from tests.support.small_runs import MODEL


def _collected(flags: str) -> tuple[list[int], list[int]]:
    """Return the steps at whose end everything was collected, and those after whose evaluation the youngest was."""
    collections: list[int] = []
    whole: list[int] = []
    young: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            collections.append(info["generation"])

    class Looks(Callback):
        """It hears of a step and of an evaluation after the collection."""

        def on_step_begin(self, trainer: Any) -> None:
            assert not gc.isenabled()
            # It is counted one by one, which takes a quarter of a second where torch and the tests are frozen.
            assert trainer.run.state.iteration > 0 or gc.get_freeze_count() > 0
            collections.clear()

        def on_evaluation(self, trainer: Any, metrics: Any) -> None:
            young.extend([metrics.iteration] if collections[-1:] == [0] else [])

        def on_step_end(self, trainer: Any, result: Any) -> None:
            whole.extend([trainer.run.state.iteration] if 2 in collections else [])

    gc.callbacks.append(note)
    try:
        pretrain([*MODEL, "--train-iters", "8", "--manual-gc", *flags.split()], callbacks=[Looks()])
    finally:
        gc.callbacks.remove(note)
        gc.freeze()  # again: the next collection would look through torch and all tests
    assert gc.isenabled()
    return whole, sorted({*young} - {8})


@pytest.mark.parametrize(
    ("flags", "whole", "young"),
    [
        ("--manual-gc-interval 3 --eval-interval 4", [3, 4, 6, 8], [4]),
        ("--manual-gc-interval 3 --eval-interval 4 --no-manual-gc-eval", [3, 6], []),
        ("--eval-interval 4", [4, 8], [4]),
        ("--eval-interval 0", [], []),
    ],
)
def test_garbage_is_collected_at_the_steps_that_are_asked_for(flags: str, whole: list[int], young: list[int]) -> None:
    """On all ranks at once: at an interval, before an evaluation, and the youngest after it."""
    assert _collected(flags) == (whole, young)


def test_a_process_that_collects_nothing_by_itself_does_so_afterwards() -> None:
    gc.disable()
    try:
        pretrain([*MODEL, "--train-iters", "1", "--manual-gc"])
        assert not gc.isenabled()
    finally:
        gc.enable()
