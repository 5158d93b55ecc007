"""The flags beside those that a checkpoint was saved with: the model's, and the curves'. With the real files."""

import shlex
import shutil
from pathlib import Path

import pytest

from megatron_ext.checkpoint.native.checkpoint_folder import TRACKER
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.optim.curves import LearningRateCurve
from megatron_ext.train.configure import configure
from megatron_ext.verify.ranks import run_ranks
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


def test_the_same_flags_are_no_problem(saved: str) -> None:
    assert _config(saved, MODEL, REST, SCHEDULE).model.hidden_size == 48


def test_every_other_flag_of_the_model_is_listed(saved: str) -> None:
    other = shlex.split("--hidden-size 32 --num-layers 4 --swiglu=false --qk-layernorm --rotary-base 10000")
    found = _problems(saved, MODEL, REST, SCHEDULE, other)
    for words in (
        "--hidden-size 32, but the checkpoint in --load was saved with 48; use --hidden-size 48",
        "--num-layers 4, but the checkpoint in --load was saved with 2; use --num-layers 2",
        "--swiglu is not given, but the checkpoint in --load was saved with it; add --swiglu",
        "--qk-layernorm is given, but the checkpoint in --load was saved without it; leave --qk-layernorm out",
        "--rotary-base 10000.0, but the checkpoint in --load was saved with 5000.0; use --rotary-base 5000.0",
    ):
        assert words in found
    assert all("checkpoint in --load" in problem for problem in found)


def test_another_function_of_the_same_weights_may_be_finetuned(saved: str) -> None:
    assert _config(saved, MODEL, REST, SCHEDULE, ["--rotary-base", "10000", "--finetune"]).model.rotary_base == 10000
    [problem] = _problems(saved, MODEL, REST, SCHEDULE, ["--num-layers", "4", "--finetune"])
    assert problem.startswith("--num-layers 4, but")


def test_the_model_comes_from_the_checkpoint(saved: str) -> None:
    adopted = _config(saved, REST, SCHEDULE, ["--use-checkpoint-args"])
    given = _config(saved, MODEL, REST, SCHEDULE)
    assert adopted.model == given.model
    assert adopted.data == given.data


def test_what_is_typed_must_agree_with_it(saved: str) -> None:
    [problem] = _problems(saved, REST, SCHEDULE, ["--use-checkpoint-args", "--num-layers", "3"])
    assert problem.startswith("--num-layers 3, but the checkpoint in --load was saved with 2")
    assert any("missing: --num-layers" in problem for problem in _problems(saved, REST, SCHEDULE))


def test_no_checkpoint_to_take_it_from(tmp_path: Path) -> None:
    assert any(
        "holds none that is whole" in problem
        for problem in _problems(str(tmp_path), REST, SCHEDULE, ["--use-checkpoint-args"])
    )


def test_the_first_start_of_a_script_that_takes_it_has_the_flags(tmp_path: Path) -> None:
    """As Megatron-LM goes on where there is no checkpoint yet."""
    given = _config(str(tmp_path), MODEL, REST, SCHEDULE, ["--use-checkpoint-args"])
    assert given.model == _config(str(tmp_path), MODEL, REST, SCHEDULE).model


LONGER = shlex.split("--train-iters 20 --lr 3e-2 --min-lr 1e-3 --lr-warmup-iters 2 --lr-decay-style cosine")


def test_other_curves_are_refused_with_both_ways_out(saved: str) -> None:
    [problem] = _problems(saved, MODEL, REST, LONGER)
    assert "--lr 0.03 instead of 0.01, decay in samples 40 instead of 20" in problem
    assert "add --override-opt-param-scheduler to follow the flags" in problem
    assert "--use-checkpoint-opt-param-scheduler to follow the checkpoint" in problem


def test_the_flags_curves(saved: str) -> None:
    config = _config(saved, MODEL, REST, LONGER, ["--override-opt-param-scheduler"])
    curve = LearningRateCurve.from_config(config)
    assert (curve.peak, curve.decay) == (3e-2, 40)


def test_the_checkpoints_curves(saved: str) -> None:
    before = LearningRateCurve.from_config(_config(saved, MODEL, REST, SCHEDULE))
    config = _config(saved, MODEL, REST, LONGER, ["--use-checkpoint-opt-param-scheduler"])
    assert LearningRateCurve.from_config(config) == before
    assert config.training.train_iters == 20


def test_scaled_rates_are_compared_as_they_are(saved: str) -> None:
    """The checkpoint holds the rate that was trained with, whatever it was scaled from."""
    scaled = [*SCHEDULE, *shlex.split("--lr 5e-3 --min-lr 5e-4 --lr-scale-rule linear --lr-scale-base-batch-size 1")]
    assert _config(saved, MODEL, REST, scaled).optimizer.lr == 1e-2
    larger = [*REST, "--global-batch-size", "4"]
    assert "--lr 0.02 instead of 0.01" in _problems(saved, MODEL, larger, scaled)[0]
    adopted = _config(saved, MODEL, larger, scaled, ["--use-checkpoint-opt-param-scheduler"])
    assert (adopted.optimizer.lr, adopted.optimizer.min_lr) == (1e-2, 1e-3)


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_a_new_optimizer_follows_the_flags(flag: str, saved: str) -> None:
    assert _config(saved, MODEL, REST, LONGER, [flag]).optimizer.lr == 3e-2


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
