"""Every number of a step goes to the places that are for it, and to no other: all numbers differ here, and each is left
out, or 0, alone."""

import dataclasses
import shlex
from datetime import datetime
from typing import Any

import pytest

from megatron_ext.parts.experts.load_report import LayerLoad, load_report
from megatron_ext.parts.stack import numbers_of_parts
from megatron_ext.telemetry.log_line import short_line, step_line
from megatron_ext.telemetry.metrics import (
    Sample,
    SampleMetrics,
    SourceLoss,
    StepMetrics,
    TaskMetrics,
    ValidationMetrics,
    as_row,
    scalars,
    scalars_against_samples,
)
from megatron_ext.telemetry.metrics import TestMetrics as LossOfTest
from megatron_ext.train.configure import configure
from megatron_ext.untrusted.metrics_rows import check_row
from tests.support.small_runs import MODEL

ROW: dict[str, Any] = {
    "iteration": 11,
    "train_iters": 112,
    "consumed_samples": 113,
    "consumed_tokens": 114,
    "lm_loss": 1.25,
    "grad_norm": 2.5,
    "learning_rate": 0.375,
    "weight_decay": 0.0625,
    "global_batch_size": 15,
    "loss_scale": 16.0,
    "skipped_iterations": 7,
    "nan_iterations": 8,
    "elapsed_ms": 1900.0,
    "tokens_per_second": 2000.0,
    "tflops_per_gpu": 21.5,
    "mfu": 0.75,
    "peak_memory_bytes": 2300,
    "allocated_bytes": 2400,
    "reserved_bytes": 2500,
    "num_zeros": 26,
    "params_norm": 27.5,
    "time_shares": {"compute": 0.5, "communication": 0.3, "idle": 0.2},
    "slowest_rank": {"rank": 30, "ratio": 31.5, "slow": [4, 5, 6]},
    "cpu_ms": 1925.0,
    "world_size": 32,
    "resumed_at": 6,
    "consumed_by_source": {"a": {"samples": 33, "tokens": 34, "epochs": 0.35}},
}
MODELS = (
    "--num-experts 4 --disable-bias-linear --moe-router-load-balancing-type aux_loss seq_aux_loss global_aux_loss "
    "--moe-aux-loss-coeff 0.1 0.1 0.1 --moe-z-loss-coeff 0.1 --mtp-num-layers 2 --log-max-attention-logit",
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 8 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 "
    "--experimental-attention-variant dsa --dsa-indexer-topk 4 --dsa-indexer-n-heads 2 --dsa-indexer-head-dim 8 "
    "--normalization RMSNorm --disable-bias-linear",
)
"""Models whose parts report every number that there is."""

OF_PARTS = {
    "mtp_1_loss": 1.5,
    "mtp_2_loss": 1.75,
    "max_attention_logit": 27.75,
    "load_balancing_loss": 28.5,
    "seq_load_balancing_loss": 28.6,
    "global_load_balancing_loss": 28.7,
    "z_loss": 29.5,
    "indexer_loss": 29.75,
}
NUMBERS = {
    one.name: one for flags in MODELS for one in numbers_of_parts(configure([*MODEL, *shlex.split(flags)]).config)
}
STEP = StepMetrics(**ROW, numbers=tuple((NUMBERS[name], value) for name, value in OF_PARTS.items()))

TAGS: dict[str, float] = {
    "learning-rate": 0.375,
    "batch-size": 15,
    "lm loss": 1.25,
    "mtp_1 loss": 1.5,
    "mtp_2 loss": 1.75,
    "loss-scale": 16.0,
    "world-size": 32,
    "grad-norm": 2.5,
    "num-zeros": 26,
    "params-norm": 27.5,
    "max_attention_logit": 27.75,
    "load_balancing_loss": 28.5,
    "seq_load_balancing_loss": 28.6,
    "global_load_balancing_loss": 28.7,
    "z_loss": 29.5,
    "indexer loss": 29.75,
    "iteration-time": 1.9,
    "throughput": 21.5,
    "tokens-per-second": 2000.0,
    "mem-allocated-bytes": 2400,
    "mem-max-allocated-bytes": 2300,
    "mem-reserved-bytes": 2500,
    "slowest-rank": 30,
    "slowest-rank-ratio": 31.5,
    "slow-ranks": 3,
    "compute-share": 0.5,
    "communication-share": 0.3,
    "idle-share": 0.2,
}
OF_THE_MODEL = [
    "learning-rate",
    "batch-size",
    "lm loss",
    "loss-scale",
    "world-size",
    "grad-norm",
    "num-zeros",
    "params-norm",
]
"""Tags that are shown against samples, too: the rest is about the machine, or a means to the end."""

MAY_BE_MISSING = {
    "grad_norm": ["grad-norm"],
    "mfu": [],
    "num_zeros": ["num-zeros"],
    "params_norm": ["params-norm"],
    "time_shares": ["communication-share", "compute-share", "idle-share"],
    "slowest_rank": ["slow-ranks", "slowest-rank", "slowest-rank-ratio"],
    "consumed_by_source": [],
}
"""Field -> tags that are not written without it."""


def test_every_number_of_a_step_has_its_tag() -> None:
    names = [field.name for field in dataclasses.fields(StepMetrics)]
    assert [*ROW, "numbers", "reports"] == names, "the row above has all of them"
    assert NUMBERS.keys() == OF_PARTS.keys()
    assert as_row(STEP) == ROW | OF_PARTS
    assert scalars(STEP) == TAGS
    assert scalars_against_samples(STEP) == {f"{tag} vs samples": TAGS[tag] for tag in OF_THE_MODEL}


@pytest.mark.parametrize("name", MAY_BE_MISSING)
def test_what_was_not_measured_is_left_out_alone(name: str) -> None:
    gone = MAY_BE_MISSING[name]
    without = dataclasses.replace(STEP, **{name: None})
    assert scalars(without) == {tag: value for tag, value in TAGS.items() if tag not in gone}
    assert sorted(scalars_against_samples(STEP).keys() - scalars_against_samples(without).keys()) == [
        f"{tag} vs samples" for tag in gone if tag in OF_THE_MODEL
    ]
    assert as_row(without) == ROW | OF_PARTS | {name: None}


@pytest.mark.parametrize("name", OF_PARTS)
def test_a_number_of_parts_is_left_out_alone_or_zero(name: str) -> None:
    """All numbers differ, so that each tag is known by its value."""
    [tag] = [tag for tag, value in TAGS.items() if value == OF_PARTS[name]]
    others = tuple(pair for pair in STEP.numbers if pair[0].name != name)
    without = dataclasses.replace(STEP, numbers=others)
    assert as_row(without) == ROW | {one: value for one, value in OF_PARTS.items() if one != name}
    assert scalars(without) == {one: value for one, value in TAGS.items() if one != tag}
    zero = dataclasses.replace(STEP, numbers=(*others, (NUMBERS[name], 0.0)))
    assert as_row(zero) == ROW | OF_PARTS | {name: 0.0}
    assert scalars(zero) == TAGS | {tag: 0.0}


@pytest.mark.parametrize("name", [name for name, value in ROW.items() if isinstance(value, int | float)])
def test_zero_is_a_number(name: str) -> None:
    """All numbers of the row differ, so that each is known by its value."""
    shown = ROW[name] / 1000.0 if name == "elapsed_ms" else ROW[name]
    zero = {tag: 0 for tag, value in TAGS.items() if value == shown}
    assert scalars(dataclasses.replace(STEP, **{name: 0})) == TAGS | zero


def test_a_step_in_lines_for_programs_and_for_people() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, 6)
    begin = " [2026-01-02 03:04:05.000006] iteration       11/     112 | consumed samples:          113 | "
    time = "elapsed time per iteration (ms): 1900.0 | "
    balance = "load_balancing_loss: 2.850000E+01 | seq_load_balancing_loss: 2.860000E+01 | "
    balance += "global_load_balancing_loss: 2.870000E+01 | z_loss: 2.950000E+01"
    losses = f"lm loss: 1.250000E+00 | mtp_1 loss: 1.500000E+00 | mtp_2 loss: 1.750000E+00 | {balance}"
    rates = f"learning rate: 3.750000E-01 | global batch size:    15 | {losses} | loss scale: 16.0 | "
    norms = {
        "grad_norm": "grad norm: 2.500 | ",
        "num_zeros": "num zeros: 26 | ",
        "params_norm": "params norm: 27.500 | ",
    }
    end = "max attention logit: 27.750 | number of skipped iterations:   7 | number of nan iterations:   8 |"
    assert step_line(dataclasses.replace(STEP, numbers=()), now) == (
        begin + time + rates.replace(losses, "lm loss: 1.250000E+00") + "".join(norms.values()) + end.partition("| ")[2]
    )
    assert step_line(STEP, now) == begin + time + rates + "".join(norms.values()) + end
    throughput = "throughput per GPU (TFLOP/s/GPU): 21.5 | "
    assert step_line(STEP, now, throughput=True) == begin + time + throughput + rates + "".join(norms.values()) + end
    for name, text in norms.items():
        zero = "0.000" if name != "num_zeros" else "0"
        texts = norms | {name: f"{text.partition(':')[0]}: {zero} | "}
        assert (
            step_line(dataclasses.replace(STEP, **{name: 0}), now)
            == begin + time + rates + "".join(texts.values()) + end
        )
        texts = norms | {name: ""}
        assert (
            step_line(dataclasses.replace(STEP, **{name: None}), now)
            == begin + time + rates + "".join(texts.values()) + end
        )
    line = "step  11/112   loss 1.2500   norm 2.500       2,000 tokens/s   75.0% MFU   3:12 left"
    assert short_line(STEP) == f"{line}   7 skipped   8 NaN"
    assert short_line(dataclasses.replace(STEP, skipped_iterations=0)) == f"{line}   8 NaN"
    assert short_line(dataclasses.replace(STEP, nan_iterations=0)) == f"{line}   7 skipped"


def test_tags_of_what_is_told_between_steps() -> None:
    sources = (SourceLoss(name="data/a", suffix="0", loss=0.5), SourceLoss(name="data/b", suffix="code", loss=0.0))
    valid = ValidationMetrics(iteration=1, consumed_samples=2, validation_loss=30.0, sources=sources)
    most, half = 485165195.4097903, 1.6487212707001282  # of 20, at which it is capped, and of a half
    assert scalars(valid) == {
        "lm loss validation": 30.0,
        "lm loss validation ppl": pytest.approx(most, rel=1e-15),
        "lm loss validation-0": 0.5,
        "lm loss validation-0 ppl": pytest.approx(half, rel=1e-15),
        "lm loss validation-code": 0.0,
        "lm loss validation-code ppl": 1.0,
    }
    assert scalars_against_samples(valid) == {f"{tag} vs samples": value for tag, value in scalars(valid).items()}
    assert as_row(valid) == {
        "iteration": 1,
        "consumed_samples": 2,
        "validation_loss": 30.0,
        "validation_loss_by_source": {"data/a": 0.5, "data/b": 0.0},
    }
    tasks = TaskMetrics(iteration=1, consumed_samples=2, tasks={"one": {"acc": 0.0, "n": 3}, "two": {"acc": 0.25}})
    assert scalars(tasks) == {"one/acc": 0.0, "one/n": 3, "two/acc": 0.25}
    assert scalars_against_samples(tasks) == {}
    test = LossOfTest(iteration=1, consumed_samples=2, test_loss=3.0)
    samples = SampleMetrics(iteration=1, consumed_samples=2, samples=(Sample(prompt="a", text="b"),))
    assert scalars(test) == scalars(samples) == {}
    assert as_row(test) == {"iteration": 1, "consumed_samples": 2, "test_loss": 3.0}


def test_the_load_of_experts_is_in_row_and_tags_with_each_layers_extremes() -> None:
    even = LayerLoad(layer=1, tokens=(8, 8, 8, 8), dropped=0.0, router_z=2.0, bias=None)
    uneven = LayerLoad(layer=2, tokens=(16, 0, 0, 16), dropped=0.25, router_z=3.0, bias=(-0.5, 0.75))
    step = dataclasses.replace(STEP, reports=(load_report((even, uneven), has_capacity=True),))
    row, tags = as_row(step), scalars(step)
    check_row(row)
    assert row["expert_tokens"] == [[8, 8, 8, 8], [16, 0, 0, 16]]
    first, second = row["expert_load"]
    assert first == {
        **{"layer": 1, "max_over_mean": 1.0, "entropy": 1.0, "without_tokens": 0, "dropped": 0.0, "router_z": 2.0}
    }
    assert (second["max_over_mean"], second["entropy"], second["without_tokens"]) == (2.0, 0.5, 2)
    assert second["bias"] == [-0.5, 0.75]
    assert tags["expert-max-over-mean/layer 2"] == 2.0
    assert tags["expert-dropped/layer 2"] == 0.25
    assert (row["dropped_share"], tags["dropped_share"]) == (0.125, 0.125)
    assert (tags["expert-bias-least/layer 2"], tags["expert-bias-greatest/layer 2"]) == (-0.5, 0.75)
    assert "expert-bias-least/layer 1" not in tags


def test_rows_of_very_many_experts_hold_no_counts() -> None:
    wide = LayerLoad(layer=0, tokens=(1,) * 20_000, dropped=0.0, router_z=2.0, bias=None)
    row = as_row(dataclasses.replace(STEP, reports=(load_report((wide,), has_capacity=False),)))
    assert "expert_tokens" not in row
    assert row["expert_load"][0]["max_over_mean"] == 1.0
    assert "dropped_share" not in row
