"""Numbers that parts record are added up by themselves, with those of megatron-core's router, within a step alone."""

import math
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from megatron_ext.parts import numbers as of_parts
from megatron_ext.parts.numbers import RecordedNumbers
from megatron_ext.parts.protocol import Number

ONE = Number("one", "of microbatches", "nats", "one")
TOKENS = Number("tokens", "of tokens", "nats", "tokens")
LARGEST = Number("largest", "largest", "", "largest")
ENGINES = Number("z_loss", "of microbatches", "nats^2", "z_loss")
HOST = torch.device("cpu")


def _numbers(replicas: int = 1) -> RecordedNumbers:
    return RecordedNumbers({ONE: 3, LARGEST: 2, TOKENS: 1, ENGINES: 2}, replicas, HOST)


def test_what_is_recorded_in_a_step_is_added_up_in_fp64_or_compared() -> None:
    numbers = _numbers()
    with numbers.recording():
        for value in (2.0**24, 1.0, 1.0):
            of_parts.record(ONE, torch.tensor(value, requires_grad=True))
            of_parts.record(LARGEST, torch.tensor(-value))
        of_parts.record(TOKENS, torch.tensor(5.0))
    assert numbers.summed == [ONE, TOKENS, ENGINES]
    assert numbers.sums().tolist() == [2.0**24 + 2, 5.0, 0.0]
    assert numbers.largest().tolist() == [-1.0]
    taken = numbers.sums()
    with numbers.recording():
        of_parts.record(TOKENS, torch.tensor(7.0))
    assert numbers.sums().tolist() == [0.0, 7.0, 0.0], "of the new step"
    assert numbers.largest().tolist() == [-math.inf]
    assert taken.tolist() == [2.0**24 + 2, 5.0, 0.0], "the numbers of a step may be read in the next one"


def test_nothing_is_recorded_outside_of_a_step_or_without_gradients() -> None:
    numbers = _numbers()
    of_parts.record(ONE, torch.tensor(1.0))
    with numbers.recording():
        with torch.no_grad():
            of_parts.record(ONE, torch.tensor(2.0))
        of_parts.record(ONE, torch.tensor(4.0))
    of_parts.record(ONE, torch.tensor(8.0))
    assert numbers.sums().tolist() == [4.0, 0.0, 0.0]


def test_what_the_engine_records_is_taken_once() -> None:
    """Shares of a microbatch as they are; a mean over each rank's tokens, divided by the ranks that share one."""
    of_four: Any = SimpleNamespace(size=lambda: 12)
    tracker, numbers = get_moe_metrics_tracker(), _numbers(replicas=3)
    tracker.record("one", torch.tensor(99.0), 1, 2)
    with numbers.recording():
        for layer in (1, 2):
            tracker.record("one", torch.tensor(1.5), layer, 2)
            tracker.record("z_loss", torch.tensor(8.0), layer, 2, avg_group=of_four)
            tracker.record("nobody's", torch.tensor(1.0), layer, 2)
    assert numbers.sums().tolist() == [3.0, 0.0, 4.0]
    with numbers.recording():
        pass
    assert numbers.sums().tolist() == [0.0, 0.0, 0.0]


def test_a_number_is_the_mean_that_it_says() -> None:
    """Over its parts and the microbatches of all replicas, over tokens, or none."""
    numbers = _numbers(replicas=4)
    found = numbers.by_name([120.0, 6.0, 32.0], [0.5], microbatches=2, tokens=12)
    assert found == {"one": 120.0 / (3 * 8), "largest": 0.5, "tokens": 0.5, "z_loss": 32.0 / (2 * 8)}
    assert math.isnan(numbers.by_name([1.0, 0.0, 1.0], [0.5], microbatches=2, tokens=0)["tokens"])
    assert numbers.with_values(found) == ((ONE, 5.0), (LARGEST, 0.5), (TOKENS, 0.5), (ENGINES, 2.0))
    assert numbers.with_values({}) == ()
