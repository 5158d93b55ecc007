"""Steps of a real small run, taken once more: from which checkpoint, with whose flags, and compared with its log."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove import replay
from megatron_ext.plugins.prove.commands.replay_step import main
from megatron_ext.train.pretrain import pretrain
from tests.support.small_runs import WITHOUT_LENGTH

ALONE = [*WITHOUT_LENGTH, "--eval-iters", "0", "--save-interval", "3", "--log-interval", "2", "--skip-samples", "4-7"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nine steps with checkpoints after 3, 6 and 9; from the fourth step on gradients are clipped otherwise, and the
    second one is left out. Every other step is in the log."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*ALONE, "--train-iters", "9", "--save", str(folder), "--load", str(folder)]
    pretrain([*flags, "--exit-interval", "3", "--clip-grad", "0.01"])
    pretrain([*flags, "--clip-grad", "0.02"])
    return folder


@pytest.mark.parametrize(
    ("step", "begun", "logged"),
    [(1, 0, [1]), (2, 0, [1, 2]), (3, 0, [1, 2]), (4, 3, [4]), (6, 3, [4, 6]), (7, 6, []), (9, 6, [8])],
)
def test_a_step_is_repeated_to_the_bit(run: Path, step: int, begun: int, logged: list[int]) -> None:
    """It begins with the checkpoint before it, and with the flags of the one after. Steps that were logged have the
    mean since the last line, the first one a line of its own; the second is skipped."""
    found = replay.replay(run, step)
    assert found.begun == begun
    assert [one.iteration for one in found.steps] == list(range(begun + 1, step + 1))
    assert [list(one.samples) for one in found.steps] == [
        list(range(4 * number, 4 * number + 4)) for number in range(begun, step)
    ]
    assert [one.iteration for one in found.steps if one.distance is not None] == logged
    assert {one.distance for one in found.steps if one.distance is not None} <= {0.0}
    assert all((one.grad_norm is None) == (one.iteration == 2) for one in found.steps)
    assert [note.partition(" ")[0] for note in found.notes] == ["dropout"]


def test_another_log_is_compared_with_where_it_is_named(run: Path, tmp_path: Path) -> None:
    """Nothing to compare with is no agreement either."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["iteration"] == 4:
            row["lm_loss"] *= 1.0 + 1e-7
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    [step] = replay.replay(run, 4, metrics=other).steps
    assert step.distance == pytest.approx(1e-7, rel=1e-3)
    assert main([str(run), "4", "--metrics", str(other)]) == 0
    assert main([str(run), "4", "--metrics", str(other), "--tolerance", "0"]) == 1
    assert main([str(run), "4", "--tolerance", "0"]) == 0
    assert main([str(run), "5"]) == 1


def test_samples_of_a_step_are_shown_from_the_first_to_the_last(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "4"]) == 0
    row = capsys.readouterr().out.splitlines()[2].split()
    assert row[:2] == ["4", "12-15"]
    assert row[2] == row[3]
    assert row[4] == row[5]


def test_a_step_that_no_checkpoint_is_before(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no checkpoint of step 0 or before; give a --save folder$"):
        replay.replay(run, 0)
    with pytest.raises(
        ConfigurationError, match=rf"^{tmp_path} holds no checkpoint of step 5 or before; give a --save"
    ):
        replay.replay(tmp_path, 5)
    with pytest.raises(ConfigurationError, match=r"^the run ends after step 9; give a step of it$"):
        replay.replay(run, 10)


def test_a_run_that_began_with_other_weights_is_replayed_after_its_first_checkpoint(run: Path, tmp_path: Path) -> None:
    flags = [*ALONE, "--train-iters", "6", "--load", str(run), "--finetune", "--save", str(tmp_path)]
    pretrain(flags)
    assert replay.replay(tmp_path, 4).begun == 3
    with pytest.raises(ConfigurationError, match=r"give a step after its first checkpoint, iteration 3$"):
        replay.replay(tmp_path, 2)


def test_a_checkpoint_whose_flags_cannot_be_read_is_not_this_programs(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    for config in copied.glob("iter_*/config.yaml"):
        config.write_text("no mapping")
    with pytest.raises(ConfigurationError, match=r"has no config\.yaml that can be read; was it saved by this program"):
        replay.replay(copied, 5)


@pytest.mark.parametrize(
    ("values", "notes"),
    [
        ({}, []),
        ({"hidden_dropout": 0.0, "attention_dropout": 0.0}, []),
        ({"hidden_dropout": 0.1}, ["dropout"]),
        ({"attention_dropout": 0.1}, ["dropout"]),
        ({"bf16": True}, ["16 bits"]),
        ({"fp16": True}, ["16 bits"]),
        ({"attention_dropout": 0.1, "bf16": True}, ["dropout", "16 bits"]),
    ],
)
def test_what_may_keep_the_numbers_apart(values: dict[str, Any], notes: list[str]) -> None:
    found = replay._notes(values)
    assert len(found) == len(notes)
    assert all(text.startswith(begin) for text, begin in zip(found, notes, strict=True))


@pytest.mark.parametrize(
    ("loss", "norm", "recorded", "distance"),
    [
        (2.0, 4.0, (None, None), None),
        (2.0, 4.0, (None, 4.0), None),
        (2.0, 4.0, (2.0, 4.0), 0.0),
        (2.0, 4.0, (4.0, 4.0), 0.5),
        (4.0, 4.0, (2.0, 4.0), 0.5),
        (2.0, 4.0, (2.0, 1.0), 0.75),
        (2.0, 1.0, (2.0, 4.0), 0.75),
        (2.0, 4.0, (4.0, 1.0), 0.75),
        (2.0, None, (2.0, None), 0.0),
        (2.0, None, (4.0, None), 0.5),
        # One of the two has skipped the step.
        (2.0, None, (2.0, 4.0), math.inf),
        (2.0, 4.0, (2.0, None), math.inf),
        (math.nan, 4.0, (math.nan, 4.0), 0.0),
        (math.nan, 4.0, (2.0, 4.0), math.inf),
        (2.0, math.inf, (2.0, math.inf), 0.0),
        (2.0, math.inf, (2.0, 1.0), math.inf),
        (-2.0, 4.0, (2.0, 4.0), 2.0),
        (0.0, 4.0, (0.0, 4.0), 0.0),
    ],
)
def test_loss_and_norm_are_compared(
    loss: float, norm: float | None, recorded: tuple[float | None, float | None], distance: float | None
) -> None:
    """Relatively to the larger; the farther of the two counts."""
    assert replay.Step(5, range(4), loss, norm, *recorded).distance == distance


def test_one_process_needs_no_flags_of_layout_and_checks() -> None:
    """Nor what is not given; data is read at once and compared with nothing."""
    values = {
        "lr": 0.5,
        "swiglu": False,
        "bf16": True,
        "skip_samples": ["1-2", "5"],
        "lr_decay_iters": None,
        "tensor_model_parallel_size": 4,
        "save": "folder",
        "log_interval": 5,
        "profile": True,
        "recompute_granularity": "full",
        "exit_interval": 3,
        "skip_train": True,
        "spike_threshold": 2.0,
        "num_workers": 7,
        "eval_iters": 9,
        "no_such_flag": 1,
    }
    alone = replay._alone(values)
    kept = {"lr": 0.5, "swiglu": False, "bf16": True, "skip_samples": ["1-2", "5"]}
    assert alone == {**kept, "eval_iters": 0, "num_workers": 0, "verify_data": "off"}
    words = "--lr 0.5 --swiglu=false --bf16=true --skip-samples 1-2 5 --eval-iters 0 --num-workers 0 --verify-data off"
    assert " ".join(replay.to_words(alone)) == words


def test_rows_of_steps_by_their_iteration(tmp_path: Path) -> None:
    """Evaluations have rows of their own."""
    rows: list[dict[str, Any]] = [
        {"iteration": 1, "lm_loss": 2.0, "consumed_tokens": 8},
        {"iteration": 5, "lm_loss": 1.0, "grad_norm": 3.0, "consumed_tokens": 16},
        {"iteration": 5, "validation_loss": 4.0},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert replay._recorded(path) == {1: rows[0], 5: rows[1]}
    assert replay._recorded(tmp_path / "none.jsonl") == {}
