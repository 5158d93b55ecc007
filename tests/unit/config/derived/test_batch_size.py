"""Batches by samples consumed, scaled rates, and what is known of optimizers. Expected values are written by hand."""

import shlex
from typing import Any

import pytest
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megatron_ext.config.derived import batch_size
from megatron_ext.config.derived.batch_size import batch_phases, global_batch_size, samples_at_iteration
from megatron_ext.config.derived.optimizers import OPTIMIZERS, has_own_optimizer, run_by, traits_of
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config, OptimizerConfig, TrainingConfig
from tests.support.small_models import MIXTURE, distinct_config
from tests.support.wrong_flags import BASE


@pytest.mark.parametrize(
    ("consumed", "ramp", "schedule"),
    [
        (0, 4, 4),
        (31, 4, 4),
        (32, 4, 8),
        (33, 4, 8),
        (99, 4, 12),
        (100, 8, 12),
        (199, 8, 12),
        (200, 12, 12),
        (900, 12, 12),
    ],
)
def test_the_next_batch(consumed: int, ramp: int, schedule: int) -> None:
    """A ramp of two steps of 4 over 200 samples; a schedule whose thresholds are 32 and 64 samples, in tokens."""
    training = {"rampup_batch_size": (4, 4, 200)}
    assert batch_size.global_batch_size(distinct_config(training=training), consumed) == ramp
    training = {"step_batch_size_schedule": "0:4 1024:8 2.079K:12"}
    expected = 12 if consumed >= 64 else schedule
    assert batch_size.global_batch_size(distinct_config(training=training), consumed) == expected
    assert batch_size.global_batch_size(distinct_config(), consumed) == 12


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:8 8K:16", [(0, 8), (8, 16)]),
        ("8191:16,0:8", [(0, 8), (8, 16)]),
        ("0:8 1.5M:16", [(0, 8), (1500, 16)]),
        ("0:8 2B:64 1T:128", [(0, 8), (2_000_000, 64), (1_000_000_000, 128)]),
        ("0:8 999:16", "each threshold must be at least one sample of 1000 tokens above the one before it"),
        ("0:8 1000:16 1999:32", "each threshold must be at least one sample of 1000 tokens above the one before it"),
        ("1000:8", "the first threshold must be 0"),
        ("", "the first threshold must be 0"),
        *(
            (f"0:8 {entry}", f"'{entry}' is not a threshold in tokens, a colon and a number of samples")
            for entry in ("9:0", "1.2.3:4", "8", "1..2K:9", "1G:9", "9:8.5", "9:-8")
        ),
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


def test_batches_of_an_evaluation_and_of_replicas() -> None:
    own = {"eval_global_batch_size": 6, "eval_micro_batch_size": 3}
    assert [batch_size.evaluation_batch(distinct_config(training=training)) for training in ({}, own)] == [
        (12, 2),
        (6, 3),
    ]
    layout = {"world_size": 12, "tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    config = distinct_config(MIXTURE, {**layout, "expert_model_parallel_size": 2, "context_parallel_size": 2})
    assert (config.layout.data_parallel_size, config.layout.expert_data_parallel_size) == (3, 6)
    assert (batch_size.num_microbatches(config, 12), batch_size.num_microbatches(config, 12, 1)) == (2, 4)
    with pytest.raises(AssertionError):
        batch_size.num_microbatches(config, 13)


@pytest.mark.parametrize(
    ("first", "second", "short"),
    [("fp32", "fp32", False), ("bf16", "fp32", True), ("fp32", "bf16", True), ("fp16", "fp16", True)],
)
def test_averages_in_16_bits_are_those_of_another_class(first: str, second: str, short: bool) -> None:
    settings = OptimizerConfig(exp_avg_dtype=first, exp_avg_sq_dtype=second)
    traits, names = traits_of(settings), {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    assert [state.dtype for state in traits.kept(settings)] == [names[first], names[second]]
    assert traits.bytes_each(settings) == sum(4 if one == "fp32" else 2 for one in (first, second))
    assert (traits.torch_class == "torch.optim:AdamW") == (not short)
    assert traits.is_the_engines == (not short)


def test_what_is_known_of_optimizers() -> None:
    sgd = OPTIMIZERS["sgd"]
    settings = [OptimizerConfig(optimizer="sgd", sgd_momentum=momentum) for momentum in (0.0, 0.5)]
    assert [sgd.state_names(one) for one in settings] == [(), ("momentum_buffer",)]
    assert [has_own_optimizer(saved) for saved in ({}, {"optimizer": "adam"}, {"optimizer": "mine"})] == [
        False,
        False,
        True,
    ]
    names = {
        scheme: [one.name for one in run_by(scheme)] for scheme in ("use_distributed_optimizer", "use_torch_fsdp2")
    }
    others = ("muon", "lion", "adaptive_muon", "adafactor", "ademamix", "schedule_free")
    assert names == {
        "use_distributed_optimizer": ["adam", *others],
        "use_torch_fsdp2": ["adam", "sgd", *others],
    }


SEQ_LENGTH = 64  # of BASE


def resolved(schedule: str, length: str) -> Config:
    line = f"{BASE.replace('--train-iters 100', length)} --step-batch-size-schedule '{schedule}'"
    return resolve(parse(shlex.split(line)).values, Facts())


SCHEDULES = ["0:4", "0:2 1K:4 2.4K:6", "0:4,640:8,0.002M:12", "2K:8 0:4", "0:8 64:6 128:4 192:2", "0:16 65:2"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_step_has_megatrons_batch(schedule: str):
    config = resolved(schedule, "--train-iters 40")
    calculator = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, schedule, SEQ_LENGTH)
    assert config.training.global_batch_size == calculator.schedule[-1][1]
    consumed, sizes = 0, []
    for step in range(40):
        assert samples_at_iteration(config, step) == consumed
        calculator.update(consumed, consistency_check=True)
        assert global_batch_size(config, consumed) == calculator.current_global_batch_size
        sizes.append(calculator.current_global_batch_size)
        consumed += sizes[-1]
    assert [phase.global_batch_size for phase in batch_phases(config) for _ in range(phase.steps)] == sizes


def test_a_schedule_may_be_several_words_as_a_shell_makes_of_an_array_without_quotes():
    typed = parse(shlex.split(f"{BASE} --step-batch-size-schedule 0:2 1K:4 2.4K:6"))
    assert typed.values["step_batch_size_schedule"] == "0:2 1K:4 2.4K:6"


@pytest.mark.parametrize("ramp", [(1, 1, 295), (1, 1, 316), (1, 1, 9), (2, 1, 58), (4, 1, 100), (3, 2, 29)])
def test_phases_are_the_steps_also_where_a_quotient_is_rounded(ramp: tuple[int, int, int]) -> None:
    """295 samples over a seventh of 295 is less than 7 in floating point, and Megatron's formula, which is ours, asks
    for the whole part of that; a phase begins where the formula says so. At the last sample of the ramp it still
    counts."""
    start, increment, samples = ramp
    for increments in (1, 2, 3, 6, 7, 11, 13):
        training = TrainingConfig(
            global_batch_size=start + increments * increment, rampup_batch_size=ramp, train_iters=2 * samples
        )
        config = Config(training=training)
        sizes, consumed = [], 0
        for step in range(2 * samples):
            if samples < 60 and step < 40:
                assert samples_at_iteration(config, step) == consumed
            sizes.append(global_batch_size(config, consumed))
            consumed += sizes[-1]
        assert [phase.global_batch_size for phase in batch_phases(config) for _ in range(phase.steps)] == sizes
        at_the_end = start + int(samples / (samples / increments)) * increment
        assert global_batch_size(config, samples) == min(at_the_end, training.global_batch_size)
        assert global_batch_size(config, samples + 1) == training.global_batch_size
