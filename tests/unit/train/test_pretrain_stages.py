"""--stages: a run of several stages is, to the bit, runs made one after another by hand, resumed anywhere."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import DataError, StoppedBySignal
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback
from tests.support.corpora import write_corpus
from tests.support.resaving import Saved, assert_same_tensors, tensors_of
from tests.support.small_runs import MODEL

FLAGS = [*(word for word in MODEL if word != "--mock-data"), "--tokenizer-type", "NullTokenizer", "--eval-iters", "0"]
FLAGS += ["--train-iters", "6", "--log-interval", "1", "--hidden-dropout", "0.1"]


def _flags(folder: Path) -> list[str]:
    """Return the flags of a run of three stages, whose data and file of stages this writes into a folder."""
    for name in "ab":
        write_corpus(folder / name, 6000 + 1000 * (name == "b"))
    stages = folder / "stages.yaml"
    stages.write_text(
        f"2: {{data_path: [0.7, {folder}/a, 0.3, {folder}/b]}}\n"
        "4: {seq_length: 32, rotary_base: 70000, micro_batch_size: 1}\n"
    )
    return [*FLAGS, "--data-path", str(folder / "a"), "--stages", str(stages)]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return _flags(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], int]:
    """The losses of a run that nothing interrupts, and how many of them are in its metrics file."""
    folder = tmp_path_factory.mktemp("whole")
    losses = list(_run(folder / "whole", _flags(folder)).losses)
    return losses, _rows(folder / "whole")


def _rows(save: Path) -> int:
    return (save / "metrics.jsonl").read_text().count("lm_loss")


def _run(folder: Path, flags: list[str], *more: str) -> Any:
    return pretrain([*flags, "--save", str(folder), "--load", str(folder), *more])


def test_stages_are_runs_that_go_on_with_other_flags(flags: list[str], tmp_path: Path) -> None:
    staged = _run(tmp_path / "staged", flags)
    assert (staged.iteration, len(staged.losses), staged.stop_reason) == (6, 6, None)
    plain = flags[: flags.index("--stages")]
    blend = ["--data-path", "0.7", str(tmp_path / "a"), "0.3", str(tmp_path / "b")]
    longer = ["--seq-length", "32", "--micro-batch-size", "1", "--rotary-base", "70000"]
    by_hand = list(_run(tmp_path / "hand", plain, "--exit-interval", "2").losses)
    other = ["--accept-changed-data"]
    by_hand += _run(tmp_path / "hand", plain, *blend, *other, "--exit-interval", "4").losses
    # Resuming by hand refuses another rotary base: it is written into the checkpoint's configuration.
    saved = tmp_path / "hand/iter_0000004/config.yaml"
    saved.write_text(saved.read_text().replace("rotary_base: 10000", "rotary_base: 70000"))
    (tmp_path / "hand/iter_0000004/manifest.json").unlink(missing_ok=True)
    by_hand += _run(tmp_path / "hand", plain, *blend, *longer, *other).losses
    assert list(staged.losses) == by_hand
    one, other = (Saved(str(tmp_path / name), tensors_of(str(tmp_path / name), 6), []) for name in ("staged", "hand"))
    assert_same_tensors(one, other)


def test_a_file_that_changes_nothing_changes_nothing(flags: list[str], tmp_path: Path) -> None:
    once = pretrain(flags[: flags.index("--stages")])
    (tmp_path / "stages.yaml").write_text("1: {seq_length: 16}\n3: {seq_length: 16}")
    assert _run(tmp_path / "same", flags).losses == once.losses


@pytest.mark.parametrize("step", range(1, 6))
def test_a_run_goes_on_in_the_middle_of_a_stage_and_between_two(
    step: int, flags: list[str], whole: tuple[list[float], int], tmp_path: Path
) -> None:
    begun = _run(tmp_path / "cut", flags, "--exit-interval", str(step))
    assert begun.iteration == step
    ended = _run(tmp_path / "cut", flags)
    assert ([*begun.losses, *ended.losses], _rows(tmp_path / "cut")) == whole
    assert whole[1] == 6


class Asks(Callback):
    """Asks the run to stop where its first stage is over: while that is saved, or before the next is built."""

    def __init__(self, when: str):
        self.when = when

    def on_end(self, trainer: Any) -> None:
        if self.when == "saved":
            self._ask()

    def close(self) -> None:
        if self.when == "gone":
            self._ask()

    def _ask(self) -> None:
        self.when = "never"
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("when", ["saved", "gone"])
def test_sigterm_between_two_stages_stops_in_the_first_step_of_the_next(
    when: str, flags: list[str], whole: tuple[list[float], int], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    words = [*flags, "--save", str(tmp_path / "cut"), "--load", str(tmp_path / "cut")]
    with pytest.raises(StoppedBySignal, match="stopped at iteration 3: SIGTERM; saved to") as stop:
        pretrain(words, callbacks=[Asks(when)])
    assert stop.value.exit_code == 75
    assert signal.getsignal(signal.SIGTERM) == before
    ended = _run(tmp_path / "cut", flags)
    assert list(ended.losses) == whole[0][3:]


def test_data_that_changes_within_a_stage_is_refused(flags: list[str], tmp_path: Path) -> None:
    _run(tmp_path / "save", flags, "--exit-interval", "3")
    write_corpus(tmp_path / "b", 9000)
    with pytest.raises(DataError, match="the data is not that of the checkpoint"):
        _run(tmp_path / "save", flags)
