"""How large the global batch is, as a function of the samples consumed so far. Pure arithmetic."""

from megatron_ext.config.schema import Config


def global_batch_size(config: Config, consumed_samples: int) -> int:
    """Samples in the optimizer step that follows after `consumed_samples`.

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
    """Microbatches that each data-parallel rank computes in a step of `global_batch` samples."""
    per_microbatch = config.training.micro_batch_size * config.layout.data_parallel_size
    assert global_batch % per_microbatch == 0, (global_batch, per_microbatch)
    return global_batch // per_microbatch


def samples_at_iteration(config: Config, iteration: int) -> int:
    """Samples consumed by the first `iteration` optimizer steps."""
    ramp = config.training.rampup_batch_size
    if ramp is None:
        return iteration * config.training.global_batch_size
    consumed = step = 0
    while step < iteration and consumed <= ramp[2]:
        consumed += global_batch_size(config, consumed)
        step += 1
    return consumed + (iteration - step) * config.training.global_batch_size
