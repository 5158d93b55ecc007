"""The curves against megatron-core's scheduler, to the last bit."""

import dataclasses
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ext.config.derived.batch_size import samples_at_iteration
from megatron_ext.config.parse.saved import read_saved
from megatron_ext.config.schema import Config, ModelConfig, OptimizerConfig, TrainingConfig
from megatron_ext.optim.curves import LearningRateCurve, WeightDecayCurve, learning_rate, weight_decay

BATCH = 16
STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
LAST_PHASES = ["exponential", "linear", "cosine", "minus_sqrt"]


def config_with(training: dict[str, Any] | None = None, **optimizer: Any) -> Config:
    training = {"train_iters": 20, "global_batch_size": BATCH} | (training or {})
    optimizer = {"lr": 3e-4, "min_lr": 1e-5} | optimizer
    return Config(training=TrainingConfig(**training), optimizer=OptimizerConfig(**optimizer))


def the_engines(config: Config, progress: int) -> tuple[float, float]:
    """Learning rate and weight decay after `progress` samples, reached by the engine in one step.

    Lengths are those of the flags, as Megatron-LM takes them: iterations times the full global batch, or samples.
    """
    flags, training = config.optimizer, config.training
    if training.train_samples is None:
        of_run = (training.train_iters or 0) * BATCH
        decay = of_run if flags.lr_decay_iters is None else flags.lr_decay_iters * BATCH
        warmup = flags.lr_warmup_iters * BATCH
        last_phase = None if flags.lr_wsd_decay_iters is None else flags.lr_wsd_decay_iters * BATCH
    else:
        of_run = training.train_samples
        decay = of_run if flags.lr_decay_samples is None else flags.lr_decay_samples
        warmup, last_phase = flags.lr_warmup_samples, flags.lr_wsd_decay_samples
    constant = flags.weight_decay_incr_style == "constant"
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=flags.lr_warmup_init,
        max_lr=flags.lr,  # pyright: ignore[reportArgumentType]
        min_lr=flags.min_lr,
        # a fraction makes it a float there too
        lr_warmup_steps=warmup if flags.lr_warmup_fraction is None else flags.lr_warmup_fraction * decay,  # pyright: ignore[reportArgumentType]
        lr_decay_steps=decay,
        lr_decay_style=flags.lr_decay_style,
        start_wd=flags.weight_decay if constant else flags.start_weight_decay,  # pyright: ignore[reportArgumentType]
        end_wd=flags.weight_decay if constant else flags.end_weight_decay,  # pyright: ignore[reportArgumentType]
        wd_incr_steps=of_run,
        wd_incr_style=flags.weight_decay_incr_style,
        wsd_decay_steps=last_phase,
        lr_wsd_decay_style=flags.lr_wsd_decay_style,
    )
    scheduler.step(progress)
    group = optimizer.param_groups[0]
    return group["lr"], group["weight_decay"]


def assert_equals_the_engine(config: Config, progress: int) -> None:
    rate, decay = LearningRateCurve.from_config(config), WeightDecayCurve.from_config(config)
    ours = learning_rate(progress, rate), weight_decay(progress, decay)
    assert ours == the_engines(config, progress), progress


@pytest.mark.parametrize(
    "warmup",
    [{}, {"lr_warmup_iters": 3}, {"lr_warmup_iters": 3, "lr_warmup_init": 1e-6}, {"lr_warmup_fraction": 0.13}],
    ids=["none", "iters", "init", "fraction"],
)
@pytest.mark.parametrize("decay_iters", [None, 11, 30])
@pytest.mark.parametrize(
    ("style", "last_phase"),
    [(style, "linear") for style in STYLES[:-1]] + list(itertools.product(["WSD"], LAST_PHASES)),
)
def test_learning_rate_equals_the_engine(warmup: dict, decay_iters: int | None, style: str, last_phase: str):
    config = config_with(
        lr_decay_style=style,
        lr_wsd_decay_style=last_phase,
        lr_wsd_decay_iters=4,
        lr_decay_iters=decay_iters,
        **warmup,
    )
    # Steps of 5 samples land before, on and after every border (all multiples of 16), as a batch ramp-up does.
    for progress in sorted({*range(0, 40 * BATCH, 5), *range(0, 40 * BATCH, BATCH)}):
        assert_equals_the_engine(config, progress)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_weight_decay_equals_the_engine(style: str):
    config = config_with(weight_decay_incr_style=style, start_weight_decay=0.01, end_weight_decay=0.1)
    for progress in range(0, 25 * BATCH, 7):
        assert_equals_the_engine(config, progress)


@pytest.mark.parametrize("style", STYLES[1:])
def test_borders_are_the_engines_where_rounding_tells_their_sides_apart(style: str):
    """0.03 + (0.3 - 0.03) is not 0.3: at the end of a warmup it still counts, as does the end of the decay's growth."""
    config = config_with(
        lr=0.3, min_lr=0.03, lr_warmup_iters=3, lr_decay_style=style, lr_wsd_decay_iters=4, lr_wsd_decay_style="linear"
    )
    assert learning_rate(3 * BATCH, LearningRateCurve.from_config(config)) == 0.3
    assert_equals_the_engine(config, 3 * BATCH)
    growing = {"start_weight_decay": 0.03, "end_weight_decay": 0.3, "weight_decay_incr_style": "linear"}
    config = config_with(**growing)
    assert 0.03 + (0.3 - 0.03) != 0.3
    assert_equals_the_engine(config, 20 * BATCH)


GROWING = [
    {"rampup_batch_size": (8, 8, 80)},
    {"rampup_batch_size": (4, 4, 64)},
    {"step_batch_size_schedule": "0:8 2048:12 4096:16"},
    {},
]


@pytest.mark.parametrize("training", GROWING)
@pytest.mark.parametrize("style", STYLES)
def test_iterations_of_a_growing_batch_are_the_steps_of_the_run(training: dict, style: str):
    """The warmup ends with its last step, WSD's last phase has its steps, and the run ends where the curves do."""
    increase = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.0, "end_weight_decay": 0.5}
    last_phase = {"lr_wsd_decay_iters": 4} if style == "WSD" else {}
    config = config_with(training, lr_decay_style=style, lr_warmup_iters=2, **last_phase, **increase)
    config = dataclasses.replace(config, model=ModelConfig(seq_length=64))
    rate, decay = LearningRateCurve.from_config(config), WeightDecayCurve.from_config(config)
    after = [samples_at_iteration(config, step) for step in range(21)]
    assert learning_rate(after[1], rate) == pytest.approx(1.5e-4)
    assert learning_rate(after[2], rate) == 3e-4
    if style in ("linear", "cosine", "WSD"):
        assert learning_rate(after[20], rate) == pytest.approx(1e-5)
    if style == "WSD":
        assert learning_rate(after[16], rate) == 3e-4 > learning_rate(after[17], rate)
    assert weight_decay(after[19], decay) < weight_decay(after[20], decay) == 0.5


def test_checkpoints_that_do_not_say_it_took_iterations_for_full_batches(tmp_path: Path):
    """Resumed by their own configuration, such a run keeps its curve."""
    (tmp_path / "config.yaml").write_text("train_iters: 20\nglobal_batch_size: 16\nrampup_batch_size: [8, 8, 80]\n")
    saved = read_saved(tmp_path / "config.yaml")
    assert saved is not None
    kept = config_with({"rampup_batch_size": (8, 8, 80)}, curves_in_full_batches=saved["curves_in_full_batches"])
    assert LearningRateCurve.from_config(kept).decay == WeightDecayCurve.from_config(kept).length == 20 * BATCH
    (tmp_path / "config.yaml").write_text("train_iters: 20\nglobal_batch_size: 16\n")
    assert "curves_in_full_batches" not in (read_saved(tmp_path / "config.yaml") or {})


def test_a_run_given_in_samples_reads_the_sample_flags():
    training = {"train_iters": None, "train_samples": 1000}
    config = config_with(training, lr_warmup_samples=30, lr_decay_style="WSD", lr_wsd_decay_samples=200)
    rate = LearningRateCurve.from_config(config)
    assert (rate.warmup, rate.decay, rate.wsd_decay) == (30, 1000, 200)
    assert WeightDecayCurve.from_config(config).length == 1000
    assert_equals_the_engine(config, 901)

    shorter = dataclasses.replace(config.optimizer, lr_decay_samples=700, lr_warmup_samples=0, lr_warmup_fraction=0.1)
    rate = LearningRateCurve.from_config(dataclasses.replace(config, optimizer=shorter))
    assert (rate.warmup, rate.decay) == (0.1 * 700, 700)


def test_the_first_step_of_a_warmup_from_zero_has_rate_zero():
    """As upstream: the rate of the first step is that of 0 samples."""
    curve = LearningRateCurve.from_config(config_with(lr_warmup_iters=10))
    assert learning_rate(0, curve) == 0.0
    assert learning_rate(BATCH, curve) == 3e-4 / 10


def test_power_is_the_papers_formula_of_batch_and_tokens():
    """After n tokens the smaller of --lr and batch a n^b, with a linear warmup, whatever the length of the run."""
    flags = {"lr": 0.02, "min_lr": 1e-3, "lr_warmup_iters": 3, "lr_decay_style": "power"}
    short, long = (
        dataclasses.replace(
            config_with({"train_iters": steps}, **flags, decoupled_lr=0.01), model=ModelConfig(seq_length=4096)
        )
        for steps in (200, 90000)
    )
    curve, decoupled = LearningRateCurve.from_config(long), LearningRateCurve.decoupled(long)
    assert decoupled is not None
    rates = [learning_rate(step * BATCH, curve) for step in (1, 3, 4, 60, 200, 1000, 40000, 90000)]
    expected = [BATCH * 4.6 * (step * BATCH * 4096) ** -0.51 for step in (200, 1000, 40000)]
    assert rates == pytest.approx([0.02 / 3, 0.02, 0.02, 0.02, *expected, 1e-3], rel=1e-12)
    assert 1e-3 < rates[6] < rates[5] < rates[4] < 0.02
    for step in range(200):
        assert learning_rate(step * BATCH, LearningRateCurve.from_config(short)) == learning_rate(step * BATCH, curve)
    assert learning_rate(200 * BATCH, decoupled) == pytest.approx(rates[4] / 2)


def test_the_decoupled_rate_goes_the_same_way_between_ends_of_its_own():
    config = config_with(lr_warmup_iters=3, lr_decay_style="cosine", decoupled_lr=2e-3, decoupled_min_lr=5e-4)
    curve = LearningRateCurve.decoupled(config)
    assert curve is not None
    other = config_with(lr_warmup_iters=3, lr_decay_style="cosine", lr=2e-3, min_lr=5e-4)
    for progress in range(0, 25 * BATCH, 7):
        assert learning_rate(progress, curve) == the_engines(other, progress)[0]
    without_end = LearningRateCurve.decoupled(config_with(decoupled_lr=2e-3))
    assert without_end is not None
    assert (without_end.peak, without_end.lowest) == (2e-3, 1e-5)
    to_nothing = LearningRateCurve.decoupled(config_with(decoupled_lr=2e-3, decoupled_min_lr=0.0))
    assert to_nothing is not None
    assert to_nothing.lowest == 0.0
    assert LearningRateCurve.decoupled(config_with()) is None
