"""Computes how large the global batch is, as a function of the samples consumed so far, and how long the run.

It also says how many tokens at a time --linear-cross-entropy takes, by device.
"""

import math
import re
from dataclasses import dataclass
from itertools import pairwise

from megatron_ext.config.schema import Config

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True)
class BatchPhase:
    """A phase of training with one global batch size, in optimizer steps and samples."""

    global_batch_size: int
    first_sample: int
    steps: int


def global_batch_size(config: Config, consumed_samples: int) -> int:
    """Return the samples in the optimizer step that follows after `consumed_samples`.

    With --rampup-batch-size START INCREMENT SAMPLES the batch grows by INCREMENT in equal shares of SAMPLES
    until it reaches --global-batch-size; --step-batch-size-schedule gives every size by itself. Both are Megatron-LM's.
    """
    full = config.training.global_batch_size
    if (schedule := batch_schedule(config)) is not None:
        return [size for first, size in schedule if first <= consumed_samples][-1]
    ramp = config.training.rampup_batch_size
    if ramp is None:
        return full
    start, increment, ramp_samples = ramp
    if consumed_samples > ramp_samples or full == start:
        return full
    samples_per_increment = ramp_samples / ((full - start) // increment)
    return min(start + int(consumed_samples / samples_per_increment) * increment, full)


def read_schedule(text: str, seq_length: int) -> list[tuple[int, int]]:
    """Return the (first sample, global batch size) pairs of --step-batch-size-schedule, in their order.

    `read_schedule("0:8 8K:16", 1024)` is `[(0, 8), (8, 16)]`: thresholds are in tokens, and rounded down to samples, as
    in Megatron-LM.

    Raises:
        ValueError: it is not such a schedule.
    """
    schedule = sorted(_read_step(entry, seq_length) for entry in text.replace(",", " ").split())
    firsts = [first for first, _ in schedule]
    if not firsts or firsts[0] != 0:
        raise ValueError("the first threshold must be 0")
    if any(later <= earlier for earlier, later in pairwise(firsts)):
        raise ValueError(f"each threshold must be at least one sample of {seq_length} tokens above the one before it")
    return schedule


def _read_step(entry: str, seq_length: int) -> tuple[int, int]:
    match = re.fullmatch(r"([\d.]+)([KMBT]?):(\d+)", entry.upper())
    try:
        if match is not None and int(match[3]) > 0:
            return int(float(match[1]) * _SUFFIXES[match[2]]) // seq_length, int(match[3])
    except ValueError:
        pass  # two points in a number
    raise ValueError(f"{entry!r} is not a threshold in tokens, a colon and a number of samples")


def batch_schedule(config: Config) -> list[tuple[int, int]] | None:
    """Return the validated --step-batch-size-schedule as `read_schedule` does; None without one."""
    text = config.training.step_batch_size_schedule
    return None if text is None else read_schedule(text, config.model.seq_length)


def num_microbatches(config: Config, global_batch: int, micro_batch: int | None = None) -> int:
    """Return the microbatches that each data-parallel rank computes in a step of `global_batch` samples.

    Args:
        micro_batch: samples in a microbatch; default --micro-batch-size.
    """
    per_microbatch = (micro_batch or config.training.micro_batch_size) * config.layout.data_parallel_size
    assert global_batch % per_microbatch == 0, (global_batch, per_microbatch)
    return global_batch // per_microbatch


def evaluation_batch(config: Config) -> tuple[int, int]:
    """Return the samples of a global batch and of a microbatch of an evaluation."""
    training = config.training
    return (
        training.eval_global_batch_size or training.global_batch_size,
        training.eval_micro_batch_size or training.micro_batch_size,
    )


def samples_at_iteration(config: Config, iteration: int) -> int:
    """Return the samples consumed by the first `iteration` optimizer steps."""
    if (schedule := batch_schedule(config)) is not None:
        return _samples_by_schedule(schedule, iteration)
    ramp = config.training.rampup_batch_size
    if ramp is None:
        return iteration * config.training.global_batch_size
    consumed = step = 0
    while step < iteration and consumed <= ramp[2]:
        consumed += global_batch_size(config, consumed)
        step += 1
    return consumed + (iteration - step) * config.training.global_batch_size


def _samples_by_schedule(schedule: list[tuple[int, int]], iteration: int) -> int:
    consumed = done = 0
    for (_, size), (end, _) in pairwise(schedule):
        steps = min(iteration - done, -(-(end - consumed) // size)) if consumed < end else 0
        consumed, done = consumed + steps * size, done + steps
    return consumed + (iteration - done) * schedule[-1][1]


def batch_phases(config: Config) -> list[BatchPhase]:
    """Return the whole run as phases of equal global batch size: one, or several with `--rampup-batch-size` or
    `--step-batch-size-schedule`.

    As in `global_batch_size`, the batch is start + increment x floor(consumed / (samples / increments)) until `samples`
    are consumed. The last phase ends with the run, and a last step that would need more than `--train-samples` is not
    taken.
    """
    training = config.training
    full = training.global_batch_size
    sizes = [full]
    borders = []  # consumed samples at which the next size begins
    if training.rampup_batch_size is not None:
        start, increment, samples = training.rampup_batch_size
        increments = (full - start) // increment
        sizes = [start + increment * i for i in range(increments + 1)]
        borders = [_first_of(samples / increments, i + 1) for i in range(increments)]
        borders[-1:] = [min(border, samples + 1) for border in borders[-1:]]
    elif (schedule := batch_schedule(config)) is not None:
        sizes = [size for _, size in schedule]
        borders = [first for first, _ in schedule[1:]]
    phases = []
    consumed = steps_taken = 0
    for size, border in zip(sizes, [*borders, None], strict=True):
        if training.train_iters is not None:
            left = training.train_iters - steps_taken
        else:
            assert training.train_samples is not None, "validated: one of them is given"
            left = max(training.train_samples - consumed, 0) // size
        steps = left if border is None else min(left, max(-int(-(border - consumed) // size), 0))
        if steps > 0:
            phases.append(BatchPhase(size, consumed, steps))
        consumed += size * steps
        steps_taken += steps
    return phases


def _first_of(share: float, number: int) -> int:
    """Return the first consumed samples that are `number` shares to `global_batch_size`, whose quotient is rounded."""
    first = math.ceil(share * number)
    while int(first / share) < number:
        first += 1
    while first > 0 and int((first - 1) / share) >= number:
        first -= 1
    return first


def training_steps(config: Config) -> int:
    """Return the optimizer steps of the whole run."""
    return sum(phase.steps for phase in batch_phases(config))


def training_samples(config: Config) -> int:
    """Return the samples of the whole run: --train-samples, or the samples of --train-iters iterations."""
    samples, steps = config.training.train_samples, config.training.train_iters
    return samples_at_iteration(config, steps or 0) if samples is None else samples


LOSS_CHUNKS = {"cpu": 128, "cuda": 4096}
"""Every chunk reads and writes the fp32 gradient of the whole output layer once: on a GPU that must be little compared
with its products. On a CPU the logits of 128 tokens, for a vocabulary of 50,000, are a block that the allocator keeps
(`device.cpu.keep_freed_memory`): of 256 tokens the system hands out every chunk's memory anew, page by page; of 64 the
gradient is read and written too often (benchmarks/operations.py --heads)."""
