"""What a run has taken from each source: a function of the samples consumed, so that it is exact after any resume."""

from megatron_ext.data.samples import Samples


def use_of_sources(dataset: Samples, consumed_samples: int, seq_length: int) -> dict[str, dict[str, float]]:
    """Return what the first `consumed_samples` samples took from each source, by its name.

    A prefix that a blend names twice is one source here.

    Returns:
        For each source its samples, its tokens (samples x seq_length: those read, whether or not they counted in the
        loss), and its epochs, how often it was gone through.
    """
    samples: dict[str, int] = {}
    per_epoch = {source.name: source.samples_per_epoch for source in dataset.sources}
    for source, count in zip(dataset.sources, dataset.counts(consumed_samples), strict=True):
        samples[source.name] = samples.get(source.name, 0) + count
    return {
        name: {"samples": count, "tokens": count * seq_length, "epochs": count / per_epoch[name]}
        for name, count in samples.items()
    }
