"""A run from its construction to its end: what it begins with, what it says, and what it leaves for a restart."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError, DataError, StoppedBySignal
from megatron_ext.resilience.process_end import RunStatus
from megatron_ext.train.pretrain import pretrain
from megatron_ext.train.trainer import Callback
from tests.support.corpora import write_corpus
from tests.support.resaving import Saved, assert_same_tensors, tensors_of
from tests.support.small_runs import MODEL

ALONE = [*MODEL, "--eval-iters", "0"]


def _said(capsys: pytest.CaptureFixture[str], *flags: Any, **own: Any) -> list[str]:
    """Run; return what is said of checkpoints that are loaded."""
    capsys.readouterr()
    pretrain([*ALONE, *map(str, flags)], **own)
    return re.findall(
        r"^checkpoint: ((?:resuming|finetuning|starting|beginning) .*)$", capsys.readouterr().out, re.MULTILINE
    )


def test_what_a_run_begins_with_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Finetuning may have other data; who goes on may not."""
    first, second = tmp_path / "first", tmp_path / "second"
    assert _said(capsys, "--save", first, "--exit-interval", 2) == []
    assert _said(capsys, "--save", first, "--load", first) == [f"resuming at iteration 2 of {first}"]
    assert _said(capsys, "--load", second) == [f"starting afresh: none in {second}"]
    found = _said(capsys, "--load", first, "--finetune", "--seed", 77)
    assert found == [f"finetuning from iteration 3 of {first}"]


def test_a_checkpoint_that_is_missing_ends_the_run_where_it_is_asked_for(tmp_path: Path) -> None:
    flags = [*ALONE, "--exit-on-missing-checkpoint", "--load", str(tmp_path)]
    with pytest.raises(ConfigurationError, match=rf"^--load {tmp_path}.* holds no checkpoint; name a folder that"):
        pretrain(flags)
    pretrain([*ALONE, "--save", str(tmp_path)])
    assert pretrain(flags).iteration == 3


class Does(Callback):
    """Does something at the end of the first step."""

    def __init__(self, action: Any):
        self.action = action

    def on_step_end(self, trainer: Any, result: Any) -> None:
        if trainer.run.state.iteration == 1:
            self.action()


STOPS: dict[str, tuple[list[str], int, str]] = {
    "an interval": (["--exit-interval", "1"], 0, "--exit-interval 1"),
    "SIGTERM": ([], 75, "stopped at iteration 1: SIGTERM; saved to SAVE; start again with --load SAVE"),
    "the stop file": (
        [],
        75,
        "stopped at iteration 1: the file SAVE/stop; saved to SAVE; start again with --load SAVE",
    ),
    "nothing": ([], 0, ""),
}


@pytest.mark.parametrize("how", STOPS)
def test_a_restart_of_the_launch_finds_that_it_was_stopped(
    how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stop that was planned is no failure: the restart ends with 0, and at once. Who is done leaves no note."""
    launch, save = tmp_path / "launch", tmp_path / "save"
    (launch / "attempt_0" / "0").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(launch / "attempt_0" / "0" / "error.json"))
    actions = {"SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM), "the stop file": (save / "stop").touch}
    flags, code, message = STOPS[how]
    callbacks = [Does(actions[how])] if how in actions else []
    # Our own callbacks come after the one that looks for a signal: it is seen in the second step.
    message, last = message.replace("SAVE", str(save)).replace("iteration 1", "iteration 2"), 1 if flags else 3
    if code:
        with pytest.raises(StoppedBySignal):
            pretrain([*ALONE, "--save", str(save), *flags], callbacks=callbacks)
    else:
        trained = pretrain([*ALONE, "--save", str(save), *flags], callbacks=callbacks)
        assert (trained.iteration, trained.stop_reason) == (last, message or None)
        record = json.loads((save / "exit.json").read_text())
        how_it_ended = f"stopped: {message}" if message else "done"
        assert (record["code"], record["rank"], record["iteration"]) == (0, 0, last)
        assert record["message"] == f"rank 0: {how_it_ended} at iteration {last}"
        assert (f"\n{how_it_ended} at iteration {last}\n" in capsys.readouterr().out) == bool(message)
    note = launch / "stopped.json"
    assert note.exists() == bool(message)
    if message:
        assert json.loads(note.read_text())["code"] == code
        assert json.loads(note.read_text())["message"] == message


def test_a_signal_of_an_elastic_launch_is_no_stop_for_good(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """torchrun takes the ranks down so when a machine comes or goes, and starts them again."""
    launch, save = tmp_path / "launch", str(tmp_path / "save")
    (launch / "attempt_0" / "0").mkdir(parents=True)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(launch / "attempt_0" / "0" / "error.json"))
    asked = Does(lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedBySignal):
        pretrain([*ALONE, "--elastic", "--save", save, "--load", save], callbacks=[asked])
    assert list(launch.glob("*.json")) == []


def test_of_an_earlier_run_no_record_stays(tmp_path: Path) -> None:
    (tmp_path / "exit.json").write_text("{}")
    seen: list[bool] = []
    pretrain(
        [*ALONE, "--save", str(tmp_path)], callbacks=[Does(lambda: seen.append((tmp_path / "exit.json").exists()))]
    )
    assert seen == [False]


def test_a_save_folder_in_which_no_stop_file_can_be_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "exit.json").write_text("{}")
    (tmp_path / "stop").mkdir()
    status = RunStatus(0, save=str(tmp_path))
    with pytest.raises(
        ConfigurationError, match="holds a folder named stop, but a file of that name is what stops a run"
    ):
        pretrain([*ALONE, "--save", str(tmp_path)], status)
    assert (tmp_path / "exit.json").read_text() == "{}"
    assert status.save is None, "the report of the failure writes no record there"


def test_the_banner_names_own_parts_and_where_the_run_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*ALONE, "--save", str(tmp_path), "--load", str(tmp_path)]
    pretrain([*flags, "--exit-interval", "2"])
    capsys.readouterr()
    pretrain(flags, loss=lambda token: token.cross_entropy())
    said = capsys.readouterr().out
    assert re.search(r"^device .* gloo$", said, re.MULTILINE)
    assert re.search(r"^own +loss$", said, re.MULTILINE)
    assert re.search(r"^to go +64 tokens in 4 sequences", said, re.MULTILINE)


def test_memory_that_is_the_same_is_not_saved_by_moving_there(capsys: pytest.CaptureFixture[str]) -> None:
    pretrain([*ALONE, "--optimizer-cpu-offload", "--use-distributed-optimizer"])
    same = "warning: --optimizer-cpu-offload saves nothing with --device cpu: it is the same memory\n"
    assert same in capsys.readouterr().out


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
    for name in ("manifest.json", "versions.json"):  # which say together that the files are as they were written
        (tmp_path / "hand/iter_0000004" / name).unlink()
    by_hand += _run(tmp_path / "hand", plain, *blend, *longer, *other).losses
    assert list(staged.losses) == by_hand
    one, other = (Saved(str(tmp_path / name), tensors_of(str(tmp_path / name), 6), []) for name in ("staged", "hand"))
    assert_same_tensors(one, other)


@pytest.mark.full
def test_a_file_that_changes_nothing_changes_nothing(flags: list[str], tmp_path: Path) -> None:
    once = pretrain(flags[: flags.index("--stages")])
    (tmp_path / "stages.yaml").write_text("1: {seq_length: 16}\n3: {seq_length: 16}")
    assert _run(tmp_path / "same", flags).losses == once.losses


@pytest.mark.full
@pytest.mark.parametrize("step", [2, 3])
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


@pytest.mark.full
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


@pytest.mark.full
def test_data_that_changes_within_a_stage_is_refused(flags: list[str], tmp_path: Path) -> None:
    _run(tmp_path / "save", flags, "--exit-interval", "3")
    write_corpus(tmp_path / "b", 9000)
    with pytest.raises(DataError, match="the data is not that of the checkpoint"):
        _run(tmp_path / "save", flags)
