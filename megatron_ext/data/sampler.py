"""Computes which samples a step uses from the number of samples consumed before it.

Nothing is stored and nothing is drawn, so a run resumes at any sample, with any number of data-parallel ranks. The
order is Megatron's: microbatch m of a step covers the next micro_batch_size x data_parallel_size samples, and rank r
takes the r-th slice of them.
"""


def microbatch_sample_ids(
    consumed_samples: int,
    microbatch: int,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    end: int | None = None,
) -> list[int | None]:
    """Return the samples of one microbatch on one data-parallel rank.

    Args:
        consumed_samples: samples that all ranks used before this step.
        microbatch: its number in the step, from 0.
        micro_batch_size: samples in one microbatch of one rank.
        dp_rank: this data-parallel rank, below `dp_size`.
        dp_size: number of data-parallel ranks.
        end: first sample that must not be used, or None where there is no end.

    Returns:
        `micro_batch_size` sample ids. None stands for a place past the end, which is filled by a sample that no loss
        counts: every rank and every microbatch keeps its shape in the last batch of an evaluation.
    """
    assert 0 <= dp_rank < dp_size
    first = consumed_samples + (microbatch * dp_size + dp_rank) * micro_batch_size
    return [i if end is None or i < end else None for i in range(first, first + micro_batch_size)]
