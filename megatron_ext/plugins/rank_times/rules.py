"""Rules of timing what ranks do."""

from collections.abc import Iterator

from megatron_ext.config.resolve import Facts
from megatron_ext.config.schema import Config
from megatron_ext.rules.reads import reads


@reads()
def communication_can_be_timed(config: Config, _facts: Facts) -> Iterator[str]:
    """Refuse --log-communication-share and --log-straggler where communication cannot be timed: with FSDP or
    several distributed optimizer instances, where one stream of a GPU waits for another."""
    layout, logging = config.layout, config.logging
    asked = [("--log-communication-share", logging.log_communication_share), ("--log-straggler", logging.log_straggler)]
    flags = [flag for flag, on in asked if on]
    if not flags:
        return
    parts = layout.flags_that_divide_weights
    instances = layout.num_distributed_optimizer_instances
    if instances > 1:
        parts.append(f"--num-distributed-optimizer-instances {instances}")
    if parts:
        yield (
            f"{' and '.join(flags)} time{'s'[: len(flags) == 1]} collectives and waits for them, but with "
            f"{' and '.join(parts)} one stream of a GPU waits for another; leave {'it' if len(flags) == 1 else 'them'} "
            "out (--profile --use-pytorch-profiler shows such waits)"
        )


RULES = (communication_can_be_timed,)
