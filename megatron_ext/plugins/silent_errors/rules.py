"""What the flags of checks for silent errors imply and exclude."""

from collections.abc import Iterator, Mapping
from typing import Any

from megatron_ext.config.derived.sharding import FSDP
from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.plugins.silent_errors.flags import SilentErrorFlags
from megatron_ext.rules.reads import reads

# A check takes less than a step, which reads every weight too, and more than once: less than 0.1% of the time.
STEPS_BETWEEN_REPLICA_CHECKS = 1000


def derive(values: dict[str, Any], _given: Mapping[str, Any]) -> None:
    """Fill in the steps between two checks of replicas, where weights are whole."""
    name = "check_weight_hash_across_dp_replicas_interval"
    if values.get(name) is None and not any(values.get(flag) for flag in FSDP):
        values[name] = STEPS_BETWEEN_REPLICA_CHECKS


@reads()
def sharded_weights_have_no_replicas(config: Config, _facts: Facts) -> Iterator[str]:
    """Refuse comparing data-parallel replicas where the weights are sharded."""
    interval = flags_of(config.training, SilentErrorFlags).check_weight_hash_across_dp_replicas_interval
    if not interval:
        return
    for flag in config.layout.flags_that_divide_weights:
        yield (
            f"--check-weight-hash-across-dp-replicas-interval {interval} compares whole replicas, and {flag} "
            "divides every weight; use --check-weight-hash-across-dp-replicas-interval 0"
        )


RESOLVERS = (derive,)
RULES = (sharded_weights_have_no_replicas,)
