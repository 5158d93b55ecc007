"""The flags beside those that a checkpoint was saved with: the model's, and the curves'. With the real files."""

import shlex
import shutil
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.optim.curves import LearningRateCurve
from megatron_ext.train.configure import configure
from tests.support.checkpoints import MODEL, REST, SCHEDULE, save_at


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("saved"))
    run_ranks(1, save_at, folder, [1, 2], [*MODEL, *REST, *SCHEDULE])
    return folder


def _config(saved: str, *parts: list[str]) -> Config:
    return configure([*(flag for part in parts for flag in part), "--load", saved]).config


def _problems(saved: str, *parts: list[str]) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        _config(saved, *parts)
    return caught.value.problems


def test_the_model_comes_from_the_checkpoint_and_what_is_typed_must_agree_with_it(saved: str) -> None:
    given = _config(saved, MODEL, REST, SCHEDULE)
    adopted = _config(saved, REST, SCHEDULE, ["--use-checkpoint-args"])
    assert (adopted.model, adopted.data) == (given.model, given.data)
    [problem] = _problems(saved, REST, SCHEDULE, ["--use-checkpoint-args", "--num-layers", "3"])
    assert problem.startswith("--num-layers 3, but the checkpoint in --load was saved with 2")
    assert any("missing: --num-layers" in problem for problem in _problems(saved, REST, SCHEDULE))


def test_the_curves_are_those_of_the_checkpoint_or_of_the_flags_as_asked(saved: str) -> None:
    longer = [*SCHEDULE, *shlex.split("--train-iters 20 --lr 3e-2")]
    [problem] = _problems(saved, MODEL, REST, longer)
    assert "--lr 0.03 instead of 0.01, decay in samples 40 instead of 20" in problem
    assert "--use-checkpoint-opt-param-scheduler to follow the checkpoint" in problem
    curve = LearningRateCurve.from_config(_config(saved, MODEL, REST, longer, ["--override-opt-param-scheduler"]))
    assert (curve.peak, curve.decay) == (3e-2, 40)
    config = _config(saved, MODEL, REST, longer, ["--use-checkpoint-opt-param-scheduler"])
    assert LearningRateCurve.from_config(config) == LearningRateCurve.from_config(_config(saved, MODEL, REST, SCHEDULE))
    assert config.training.train_iters == 20


def test_scaled_rates_are_compared_as_they_are(saved: str) -> None:
    """The checkpoint holds the rate that was trained with, whatever it was scaled from."""
    scaled = [*SCHEDULE, *shlex.split("--lr 5e-3 --min-lr 5e-4 --lr-scale-rule linear --lr-scale-base-batch-size 1")]
    assert _config(saved, MODEL, REST, scaled).optimizer.lr == 1e-2
    larger = [*REST, "--global-batch-size", "4"]
    assert "--lr 0.02 instead of 0.01" in _problems(saved, MODEL, larger, scaled)[0]
    adopted = _config(saved, MODEL, larger, scaled, ["--use-checkpoint-opt-param-scheduler"])
    assert (adopted.optimizer.lr, adopted.optimizer.min_lr) == (1e-2, 1e-3)


def test_exit_on_missing_checkpoint_looks_as_loading_does(saved: str, tmp_path: Path) -> None:
    """A missing or garbage tracker is no missing checkpoint."""
    flags = [*MODEL, *REST, *SCHEDULE, "--exit-on-missing-checkpoint"]
    copy = Path(shutil.copytree(saved, tmp_path / "copy"))
    (copy / TRACKER).unlink()
    assert configure([*flags, "--load", str(copy)]).config.checkpoint.load == str(copy)
    for folder, step, words in (
        (tmp_path / "nowhere", [], "it holds no checkpoint; name a folder"),
        (copy, ["--ckpt-step", "7"], "is missing or not whole"),
    ):
        [problem] = _problems(str(folder), flags, step)
        assert f"--load {folder}: " in problem
        assert words in problem
        assert "leave --exit-on-missing-checkpoint out" in problem
    for iteration in (1, 2):
        shutil.rmtree(copy / f"iter_000000{iteration}")
    (copy / TRACKER).write_text("garbage")
    [problem] = _problems(str(copy), flags)
    assert "holds 'garbage' instead of an iteration, and there is no whole checkpoint" in problem
