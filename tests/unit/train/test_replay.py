"""Which checkpoint, and whose flags, a replayed step begins from."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ext.cli.replay_step import main
from megatron_ext.config.parse.options import options_by_name
from megatron_ext.errors import ConfigurationError
from megatron_ext.train import replay
from megatron_ext.train.state import TrainState
from megatron_ext.train.step import StepResult
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


@pytest.mark.parametrize(
    ("step", "saved", "said"),
    [
        (0, [3], r"^run holds no checkpoint of step 0 or before; give a --save folder$"),
        (5, [], r"^run holds no checkpoint of step 5 or before; give a --save folder$"),
    ],
)
def test_a_step_that_no_checkpoint_is_before(
    step: int, saved: list[int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "saved_iterations", lambda folder: saved)
    with pytest.raises(ConfigurationError, match=said):
        replay.replay(Path("run"), step)


@pytest.mark.parametrize("values", [{"load_hf": "folder"}, {"finetune": True}, {"finetune": False}, {}])
def test_a_run_that_began_with_other_weights_is_replayed_after_its_first_checkpoint(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "saved_iterations", lambda folder: [3, 6])
    monkeypatch.setattr(replay, "_flags", lambda folder, iteration: values)
    monkeypatch.setattr(replay, "configure", lambda words: SimpleNamespace(config="config"))
    monkeypatch.setattr(replay, "_steps", lambda *_: [])
    assert replay.replay(Path("run"), 4).begun == 3
    if values.get("load_hf") or values.get("finetune"):
        with pytest.raises(ConfigurationError, match=r"give a step after its first checkpoint, iteration 3$"):
            replay.replay(Path("run"), 2)
    else:
        assert replay.replay(Path("run"), 2).begun == 0


@pytest.mark.parametrize(
    ("values", "metrics", "interval", "file"),
    [
        ({}, None, 100, "run/metrics.jsonl"),
        ({"log_interval": 7}, None, 7, "run/metrics.jsonl"),
        ({"log_interval": 7}, Path("other.jsonl"), 7, "other.jsonl"),
    ],
)
def test_steps_are_compared_with_the_runs_own_log(
    values: dict[str, Any], metrics: Path | None, interval: int, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(replay, "saved_iterations", lambda folder: [3])
    monkeypatch.setattr(replay, "_flags", lambda folder, iteration: values)
    monkeypatch.setattr(replay, "configure", lambda words: asked.append(words) or SimpleNamespace(config="config"))
    monkeypatch.setattr(replay, "_recorded", lambda path: {"of": str(path)})
    monkeypatch.setattr(replay, "_steps", lambda configured, *given: asked.append(given) or ["a step"])
    found = replay.replay(Path("run"), 5, metrics=metrics, device="cuda")
    assert (found.config, found.steps, found.notes) == ("config", ["a step"], [])
    default = options_by_name()["log_interval"].default
    assert asked[1] == (5, interval if values else default, {"of": file})
    words = asked[0]
    assert words[words.index("--device") + 1] == "cuda"


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


def test_flags_of_a_checkpoint_with_its_tokenizer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The copy in the checkpoint takes the place of files that are gone, and of no others."""
    there = tmp_path / "there"
    there.touch()
    saved: dict[str, Any] = {"lr": 1.0, "vocab_file": str(there), "merge_file": "gone", "tokenizer_model": "as well"}
    asked: list[Any] = []
    monkeypatch.setattr(replay, "iteration_folder", lambda folder, iteration: folder / f"iter_{iteration}")
    monkeypatch.setattr(replay, "file_inside", lambda folder, name: folder / name)
    monkeypatch.setattr(replay, "read_saved", lambda path: asked.append(path) or saved)
    copies = {name: f"kept {name}" for name in ("vocab_file", "merge_file", "tokenizer_model")}
    monkeypatch.setattr(replay, "kept_tokenizer", lambda saved, checkpoint: copies)
    assert replay._flags(tmp_path, 6) == {
        "lr": 1.0,
        "vocab_file": str(there),
        "merge_file": "kept merge_file",
        "tokenizer_model": "kept tokenizer_model",
    }
    assert asked == [tmp_path / "iter_6" / "config.yaml"]
    monkeypatch.setattr(replay, "read_saved", lambda path: None)
    with pytest.raises(ConfigurationError, match=r"iter_6 has no config\.yaml that can be read; was it saved by this"):
        replay._flags(tmp_path, 6)


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


@pytest.mark.parametrize("begins", ["afresh", "checkpoint"])
def test_steps_are_taken_once_more(begins: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were logged have the mean since the last one, the first one a line of its own; the third is skipped.
    A run that goes on from a checkpoint has the sums that are in its state."""
    from megatron_ext.checkpoint.native import agreement, load
    from megatron_ext.parallel import groups
    from megatron_ext.train import build, datasets, trainer

    heard: list[str] = []
    state = TrainState()
    run: Any = SimpleNamespace(
        state=state,
        release_graph=lambda: heard.append("release"),
        loaders=SimpleNamespace(close=lambda: heard.append("close")),
    )

    class Loop:
        def __init__(self, given: Any, callbacks: list[Any]):
            assert (given, callbacks) == (run, [])

        @property
        def finished(self) -> bool:
            return state.iteration >= 7

        def step(self) -> StepResult:
            state.iteration += 1
            state.consumed_samples += 4
            loss, updated = float(state.iteration), state.iteration != 3
            if updated:
                state.interval_loss += loss
                state.interval_losses += 1
            return StepResult(loss, 8, 4, updated, 10.0 * loss if updated else None, 1.0, None)

    def loaded(run: Any, resume: Any) -> None:
        heard.append(f"load {resume}")
        state.iteration, state.consumed_samples = 2, 8
        state.interval_loss, state.interval_losses = 2.0, 1

    monkeypatch.setattr(replay.devices, "install", lambda device: "here")
    monkeypatch.setattr(groups, "start", lambda layout, here: heard.append(f"start {here}"))
    monkeypatch.setattr(groups, "destroy", lambda: heard.append("destroy"))
    monkeypatch.setattr(agreement, "agree", lambda search, flags: f"what {search} gives")
    monkeypatch.setattr(build, "build_run", lambda config, here, resume: run)
    monkeypatch.setattr(load, "load_found", loaded)
    monkeypatch.setattr(
        datasets, "check_data_is_that_of_the_checkpoint", lambda run, resume: heard.append(f"compare {resume}")
    )
    monkeypatch.setattr(trainer, "Trainer", Loop)
    search = "the folder" if begins == "checkpoint" else None
    configured: Any = SimpleNamespace(config=small_config(), search=search)
    rows = {
        number: {"iteration": number, "lm_loss": 100.0 + number, "grad_norm": 200.0 + number} for number in range(1, 8)
    }
    del rows[6]
    found = replay._steps(configured, 6, 3, rows)
    steps = {
        1: replay.Step(1, range(4), 1.0, 10.0, 101.0, 201.0),
        2: replay.Step(2, range(4, 8), 2.0, 20.0, None, None),
        3: replay.Step(3, range(8, 12), 2.0, None, 103.0, 203.0),
        4: replay.Step(4, range(12, 16), 4.0, 40.0, None, None),
        5: replay.Step(5, range(16, 20), 5.0, 50.0, None, None),
        6: replay.Step(6, range(20, 24), 5.0, 60.0, None, None),
    }
    assert found == [steps[number] for number in range(1 if search is None else 3, 7)]
    loads = [] if search is None else ["load what the folder gives", "compare what the folder gives"]
    assert heard == ["start here", *loads, "release", "close", "destroy"]
    with pytest.raises(ConfigurationError, match=r"^the run ends after step 7; give a step of it$"):
        replay._steps(configured, 8, 3, rows)


def test_samples_of_a_step_are_shown_from_the_first_to_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = replay.Replayed(small_config(), 3, [replay.Step(4, range(24, 32), 2.5, 0.5, 2.5, 0.5)], [])
    monkeypatch.setattr(replay, "replay", lambda *_, **__: found)
    assert main(["run", "4"]) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert row.split() == ["4", "24-31", "2.5", "2.5", "0.5", "0.5"]
