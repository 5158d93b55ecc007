"""The flags of checks for silent errors; those of replicas have Megatron's names and meaning."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import free


@dataclass(frozen=True)
class SilentErrorFlags:
    """Options of checks for silent errors."""

    spike_threshold: float | None = free(
        None,
        "Repeat a batch on other data-parallel ranks before its update if its loss exceeds this multiple of the "
        "median of the last 100 steps (or is NaN). Another loss the second time means faulty hardware (exit 70); "
        "the same loss means the data, written to spike-<iteration> in --save.",
        at_least=1,
        untried_with_graphs=True,
    )
    check_weight_hash_across_dp_replicas_interval: int | None = free(
        None,
        "Steps between two checks that all data-parallel replicas hold the same weights, bit for bit (else 70); "
        "default 1000 where there are replicas; 0: never.",
        at_least=0,
    )
    check_replicated_weights_interval: int | None = free(
        None,
        "Steps between two checks that tensor-parallel ranks hold the same norms, biases, learned positions and "
        "routers, and the first and last stage the same tied embeddings, bit for bit (else 70).",
        at_least=1,
    )


FLAGS = (("training", SilentErrorFlags),)
