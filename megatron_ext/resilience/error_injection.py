"""Chooses the steps that --error-injection-rate spoils, for tests of what a run does about a bad number.

Each step of each rank is one of the rate's results, as in megatron-core's RerunErrorInjector, and at most one rank of a
step is chosen (of no more ranks than the rate). Which one follows from the seed and the step's samples alone, whatever
the layout of the ranks: a step that is taken again is spoiled again, as by a machine that always computes so
(persistent_error) or by data and settings that are bad (correct_result), which differ in the eyes of nobody who cannot
change the machine. With transient_error it also follows from how often the ranks were started: after a restart, the
step is computed well.
"""

import random

from megatron_ext import environment
from megatron_ext.config.schema import Config


def is_spoiled(config: Config, samples: range, rank: int) -> bool:
    """Return whether a rank gives a NaN for its loss in the step of the samples at these positions."""
    training = config.training
    rate = training.error_injection_rate
    if rate == 0:
        return False
    start = environment.attempt() if training.error_injection_type == "transient_error" else 0
    draw = random.Random(f"{training.seed} {samples.start} {start}")
    return (draw.randrange(rate) + rank) % rate == 0
