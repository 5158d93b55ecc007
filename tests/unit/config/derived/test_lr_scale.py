"""--lr-scale-rule: what it multiplies by, what it says, and that it multiplies once."""

import math
import shlex
from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.config.derived.lr_scale import scale, scaling_text
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import options
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config, OptimizerConfig
from megatron_ext.resilience.process_end import RunStatus
from pretrain_gpt import main
from tests.support.small_models import distinct_config
from tests.support.wrong_flags import BASE

RATES = "--lr 6e-4 --min-lr 6e-5 --global-batch-size 1024"


def resolved(flags: str) -> Config:
    return resolve(parse(shlex.split(f"{BASE} {flags}")).values, Facts())


@pytest.mark.parametrize(("rule", "factor"), [("linear", 1024 / 192), ("sqrt", math.sqrt(1024 / 192)), ("none", 1.0)])
def test_both_rates_follow_the_batch_and_not_the_ranks(rule: str, factor: float) -> None:
    base = "" if rule == "none" else "--lr-scale-base-batch-size 192"
    for layout in ("--world-size 1", "--world-size 8", "--world-size 8 --tensor-model-parallel-size 4"):
        optimizer = resolved(f"{RATES} --lr-scale-rule {rule} {base} {layout}").optimizer
        assert (optimizer.lr, optimizer.min_lr) == (6e-4 * factor, 6e-5 * factor)


def test_a_ramp_up_counts_with_its_full_batch() -> None:
    flags = f"{RATES} --lr-scale-rule linear --lr-scale-base-batch-size 256"
    assert resolved(f"{flags} --rampup-batch-size 256 256 10000").optimizer.lr == 6e-4 * 4


def test_a_resolved_configuration_is_not_scaled_again_and_scales_on_from_its_own_batch() -> None:
    first = resolved(f"{RATES} --lr-scale-rule linear --lr-scale-base-batch-size 256")
    values = {option.name: getattr(getattr(first, option.group), option.name) for option in options()}
    assert resolve(values, Facts()) == first
    assert resolve({**values, "global_batch_size": 2048}, Facts()).optimizer.lr == 6e-4 * 8


def test_the_rate_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{BASE} {RATES} --lr-scale-rule sqrt --lr-scale-base-batch-size 256"
    assert main(shlex.split(flags), RunStatus(rank=0)) == 0
    assert (
        "learning rate        0.0012 = --lr 0.0006 x sqrt(1024 / 256), lowest 0.00012 "
        "(--lr-scale-rule sqrt: the global batch over the base batch)\n"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "rates"),
    [
        ({"lr_scale_base_batch_size": 1}, [12.0, 6.0, 1.5, 0.0]),
        ({"lr_scale_base_batch_size": 48}, [0.25, 0.125, 0.03125, 0.0]),
        ({"lr_scale_base_batch_size": None}, [1.0, 0.5, 0.125, 0.0]),
        ({"lr_scale_base_batch_size": 0}, [1.0, 0.5, 0.125, 0.0]),
        ({"lr_scale_base_batch_size": 48, "lr_scale_rule": "sqrt"}, [0.5, 0.25, 0.0625, 0.0]),
        ({"lr_scale_base_batch_size": 48, "lr_scale_rule": "none"}, [1.0, 0.5, 0.125, 0.0]),
        ({"lr_scale_base_batch_size": 1, "global_batch_size": 1}, [1.0, 0.5, 0.125, 0.0]),
        ({"lr_scale_base_batch_size": 4, "global_batch_size": 1}, [0.25, 0.125, 0.03125, 0.0]),
    ],
)
def test_rates_that_are_scaled(given: dict[str, Any], rates: list[float]) -> None:
    values = {
        "lr_scale_rule": "linear",
        "global_batch_size": 12,
        "lr": 1.0,
        "decoupled_lr": 0.5,
        "decoupled_min_lr": 0.125,
        "min_lr": 0.0,
        **given,
    }
    base = values["lr_scale_base_batch_size"]
    scale(values)
    assert [values[name] for name in ("lr", "decoupled_lr", "decoupled_min_lr", "min_lr")] == rates
    takes_part = bool(base) and values["lr_scale_rule"] != "none"
    assert values["lr_scale_base_batch_size"] == (values["global_batch_size"] if takes_part else base)
    again = dict(values)
    scale(again)
    assert again == values, "once"


@pytest.mark.parametrize(
    ("training", "whose"),
    [
        ({}, "the global batch"),
        ({"rampup_batch_size": (4, 4, 200)}, "the full global batch"),
        ({"step_batch_size_schedule": "0:4 1024:12"}, "the global batch"),
    ],
)
def test_how_a_rate_came_about(training: dict[str, Any], whose: str) -> None:
    optimizer = OptimizerConfig(lr=0.5, min_lr=0.25, lr_scale_rule="sqrt")
    config = replace(distinct_config(training=training), optimizer=optimizer)
    assert scaling_text({"lr": 1.0, "lr_scale_base_batch_size": 48}, config) == (
        "learning rate        0.5 = --lr 1 x sqrt(12 / 48), lowest 0.25 (--lr-scale-rule sqrt: "
        f"{whose} over the base batch)"
    )
    assert scaling_text({}, replace(config, optimizer=OptimizerConfig(lr=0.5))) is None
