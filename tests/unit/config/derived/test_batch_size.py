"""Batches by samples consumed, scaled rates, and what is known of optimizers. Expected values are written by hand."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.config.derived import batch_size
from megatron_ext.config.derived.lr_scale import scaling_text
from megatron_ext.config.schema import OptimizerConfig
from tests.support.small_models import distinct_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:8 8K:16", [(0, 8), (8, 16)]),
        ("8191:16,0:8", [(0, 8), (8, 16)]),
        ("0:8 1.5M:16", [(0, 8), (1500, 16)]),
        ("0:8 999:16", "each threshold must be at least one sample of 1000 tokens above the one before it"),
        ("0:8 1000:16 1999:32", "each threshold must be at least one sample of 1000 tokens above the one before it"),
        ("1000:8", "the first threshold must be 0"),
        ("", "the first threshold must be 0"),
        ("0:0", "'0:0' is not a threshold in tokens, a colon and a number of samples"),
        ("1.2.3:4", "'1.2.3:4' is not a threshold in tokens, a colon and a number of samples"),
    ],
)
def test_schedules_of_batches(text: str, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=r"\S") as error:
            batch_size.read_schedule(text, 1000)
        assert str(error.value) == expected
    else:
        assert batch_size.read_schedule(text, 1000) == expected


@pytest.mark.parametrize(
    "training",
    [
        {"rampup_batch_size": (4, 4, 200)},
        {"rampup_batch_size": (12, 4, 50)},
        {"rampup_batch_size": (2, 2, 97)},
        {"step_batch_size_schedule": "0:4 1024:8 2048:12"},
        {"step_batch_size_schedule": "0:5 1024:7 1056:12"},
        {},
    ],
)
def test_samples_of_the_first_steps(training: dict[str, Any]) -> None:
    """Counted one step after another."""
    config, consumed = distinct_config(training=training), 0
    for step in range(60):
        assert batch_size.samples_at_iteration(config, step) == consumed
        consumed += batch_size.global_batch_size(config, consumed)


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({}, [(12, 0, 9)]),
        ({"train_iters": None, "train_samples": 35}, [(12, 0, 2)]),
        ({"rampup_batch_size": (4, 4, 16), "train_iters": 9}, [(4, 0, 2), (8, 8, 1), (12, 16, 6)]),
        ({"rampup_batch_size": (4, 4, 16), "train_iters": 3}, [(4, 0, 2), (8, 8, 1)]),
        ({"step_batch_size_schedule": "0:4 320:12", "train_iters": 5}, [(4, 0, 3), (12, 12, 2)]),
        (
            {"step_batch_size_schedule": "0:4 320:12", "train_iters": None, "train_samples": 30},
            [(4, 0, 3), (12, 12, 1)],
        ),
    ],
)
def test_a_run_as_phases(training: dict[str, Any], expected: list[tuple[int, int, int]]) -> None:
    """By hand: size, first sample, steps."""
    config = distinct_config(training=training)
    found = [(one.global_batch_size, one.first_sample, one.steps) for one in batch_size.batch_phases(config)]
    assert found == expected
    assert batch_size.training_steps(config) == sum(steps for _, _, steps in expected)


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
