"""Computes how large the global batch is, as a function of the samples consumed so far, and how long the run."""

from dataclasses import dataclass

from megatron_ext.config.schema import Config


@dataclass(frozen=True)
class BatchPhase:
    """A phase of training with one global batch size, in optimizer steps and samples."""

    global_batch_size: int
    first_sample: int
    steps: int


def global_batch_size(config: Config, consumed_samples: int) -> int:
    """Return the samples in the optimizer step that follows after `consumed_samples`.

    With --rampup-batch-size START INCREMENT SAMPLES the batch grows by INCREMENT in equal shares of SAMPLES
    until it reaches --global-batch-size, as in Megatron-LM.
    """
    full = config.training.global_batch_size
    ramp = config.training.rampup_batch_size
    if ramp is None:
        return full
    start, increment, ramp_samples = ramp
    if consumed_samples > ramp_samples or full == start:
        return full
    samples_per_increment = ramp_samples / ((full - start) // increment)
    return min(start + int(consumed_samples / samples_per_increment) * increment, full)


def num_microbatches(config: Config, global_batch: int) -> int:
    """Return the microbatches that each data-parallel rank computes in a step of `global_batch` samples."""
    per_microbatch = config.training.micro_batch_size * config.layout.data_parallel_size
    assert global_batch % per_microbatch == 0, (global_batch, per_microbatch)
    return global_batch // per_microbatch


def samples_at_iteration(config: Config, iteration: int) -> int:
    """Return the samples consumed by the first `iteration` optimizer steps."""
    ramp = config.training.rampup_batch_size
    if ramp is None:
        return iteration * config.training.global_batch_size
    consumed = step = 0
    while step < iteration and consumed <= ramp[2]:
        consumed += global_batch_size(config, consumed)
        step += 1
    return consumed + (iteration - step) * config.training.global_batch_size


def batch_phases(config: Config) -> list[BatchPhase]:
    """Return the whole run as phases of equal global batch size: one, or several with `--rampup-batch-size`.

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
        borders = [samples / increments * (i + 1) for i in range(increments)]
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


def training_steps(config: Config) -> int:
    """Return the optimizer steps of the whole run."""
    return sum(phase.steps for phase in batch_phases(config))
