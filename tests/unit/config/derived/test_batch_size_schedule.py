"""--step-batch-size-schedule against megatron-core's own calculator, over whole runs."""

import shlex

import pytest
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megatron_ext.config.derived.batch_size import batch_phases, global_batch_size, read_schedule, samples_at_iteration
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from tests.support.wrong_flags import BASE

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


def test_a_run_in_samples_takes_no_step_that_needs_more():
    config = resolved("0:2 1K:4 2.4K:6", "--train-samples 60")
    phases = batch_phases(config)
    assert [(phase.global_batch_size, phase.first_sample, phase.steps) for phase in phases] == [
        (2, 0, 8),
        (4, 16, 6),
        (6, 40, 3),
    ]


def test_thresholds_are_tokens_rounded_down_to_samples():
    assert read_schedule("0:8 8K:16 1.5M:32 2B:64 1T:128", 1024) == [
        (0, 8),
        (7, 16),
        (1464, 32),
        (1953125, 64),
        (976562500, 128),
    ]


@pytest.mark.parametrize("text", ["", "8", "0:0", "500:8", "0:8 0:9", "0:8 1..2K:9", "0:8 1G:9", "0:8.5", "0:-8"])
def test_what_is_no_schedule_is_refused(text: str):
    with pytest.raises(ValueError, match="threshold"):
        read_schedule(text, 64)
