"""--lr-scale-rule: what it multiplies by, what it says, and that it multiplies once."""

import math
import shlex

import pytest

from megatron_ext.config.derived.lr_scale import scale
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.options import options
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.resilience.process_end import RunStatus
from pretrain_gpt import main
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


def test_batches_of_one_sample_scale_as_others() -> None:
    for base, batch, expected in ((4, 1, 2.0), (1, 4, 32.0)):
        values = {"lr_scale_rule": "linear", "lr_scale_base_batch_size": base, "global_batch_size": batch, "lr": 8.0}
        scale(values)
        assert (values["lr"], values["lr_scale_base_batch_size"]) == (expected, batch)


def test_all_four_rates_are_scaled() -> None:
    rates = {"lr": 8.0, "min_lr": 1.0, "decoupled_lr": 2.0, "decoupled_min_lr": 0.5}
    values = {"lr_scale_rule": "linear", "lr_scale_base_batch_size": 2, "global_batch_size": 6, **rates}
    scale(values)
    assert {name: values[name] for name in rates} == {name: 3 * rate for name, rate in rates.items()}
