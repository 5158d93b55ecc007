"""Callbacks that the flags ask for, by what they do in a real small run: what they write, which steps wait for them."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.resilience.signals import STOP_FILE, SignalWatcher
from megatron_ext.train.callbacks.standard import standard_callbacks, stop_file
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.step import StepResult
from megatron_ext.train.trainer import Callback, Trainer
from tests.support.small_models import small_config
from tests.support.small_runs import MODEL, built


class Hears(Callback):
    """Writes down which steps have ended when the next begins."""

    def __init__(self) -> None:
        self.ended: list[int] = []
        self.waited_for: list[int] = []

    def on_step_begin(self, trainer: Trainer) -> None:
        self.waited_for += self.ended[-1:] if trainer.position.iteration in self.ended[-1:] else []

    def ends_before_next(self, trainer: Trainer) -> bool:
        return False

    def on_step_end(self, trainer: Trainer, result: StepResult) -> None:
        self.ended.append(trainer.run.state.iteration)


SNAPSHOTS = (
    "--non-persistent-save-interval 2 --non-persistent-ckpt-type local --non-persistent-local-ckpt-dir {0}/memory"
)
PROFILE = "--tensorboard-dir {0}/events --profile --use-pytorch-profiler --profile-step-start 9 --profile-step-end 10"
LOOK_AT_WEIGHTS: dict[str, tuple[str, list[int]]] = {
    "nothing": ("--eval-interval 0 --log-interval 1", []),
    "saves": ("--save {0}/run --save-interval 4 --eval-interval 0", [4, 8]),
    "the last save alone": ("--save {0}/run --eval-interval 0", []),
    "snapshots": (f"--save {{0}}/run --save-interval 4 {SNAPSHOTS} --eval-interval 0", [2, 4, 6, 8]),
    "snapshots where nothing is saved": (f"--save {{0}}/run {SNAPSHOTS} --eval-interval 0", [2, 4, 6, 8]),
    "evaluations": ("--eval-interval 3 --start-eval-at-iter 6", [6]),
    "a stop": ("--exit-interval 9 --eval-interval 0", []),
    "norms of the weights": (
        "--eval-interval 0 --log-params-norm --log-interval 4 --tensorboard-log-interval 5",
        [1, 4, 5, 8],
    ),
    "a clock": ("--eval-interval 0 --log-communication-share", list(range(1, 9))),
    "ranges of a profile": (f"--eval-interval 0 {PROFILE}", list(range(1, 9))),
    "collected garbage": ("--eval-interval 0 --manual-gc --manual-gc-interval 2", []),
}
"""Flags, and the steps that must have ended before the next one begins: somebody looks at the weights, or measures."""


@pytest.mark.parametrize("name", LOOK_AT_WEIGHTS)
def test_a_step_that_a_callback_works_on_ends_before_the_next(name: str, tmp_path: Path) -> None:
    """On a device whose reads wait all others are told of when the next has begun."""
    flags, expected = LOOK_AT_WEIGHTS[name]
    with built(f"--num-layers 1 --train-iters 9 {flags.format(tmp_path)}", reads_wait=True) as run:
        hears = Hears()
        callbacks = [*standard_callbacks(run, SignalWatcher(), RunStatus(0)), hears]
        try:
            Trainer(run, callbacks).fit()
        finally:
            for callback in callbacks:
                callback.close()
    assert hears.ended == list(range(1, 10))
    assert hears.waited_for == expected


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_intervals_of_lines_and_times_are_their_own_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train-iters", "7", "--log-interval", "3", "--tensorboard-log-interval", "2", "--timing-log-level", "1"]
    pretrain(
        [*MODEL, *flags, "--metrics-file", str(tmp_path / "rows.jsonl"), "--tensorboard-dir", str(tmp_path / "tb")]
    )
    rows = [row["iteration"] for row in _rows(tmp_path / "rows.jsonl") if "lm_loss" in row]
    assert rows == [1, 3, 6]
    said = capsys.readouterr().out
    assert re.findall(r"\] iteration +(\d+)/", said) == ["1", "3", "6"]
    assert said.count("(min, max) time across ranks (ms):") == 2, "times come with the lines, but for the first"


def test_a_log_line_of_another_form_and_with_throughput(capsys: pytest.CaptureFixture[str]) -> None:
    pretrain([*MODEL, "--log-throughput", "--log-interval", "1"])
    assert "throughput per GPU" in capsys.readouterr().out
    pretrain([*MODEL, "--log-format", "short", "--log-interval", "1"])
    assert "throughput per GPU" not in capsys.readouterr().out


def test_the_stop_file_lies_where_the_run_is_saved() -> None:
    config = small_config()
    assert stop_file(config) is None
    saved = dataclasses.replace(config, checkpoint=dataclasses.replace(config.checkpoint, save="folder"))
    assert stop_file(saved) == Path("folder") / STOP_FILE
