"""Lists the flags whose default is not Megatron's, and why: a column of docs/flags.md.

tests/unit/config/compat/test_megatron_options.py reads Megatron's defaults and fails where another one is not
listed here.
"""

from typing import Any, NamedTuple


class OtherDefault(NamedTuple):
    """Megatron's default of a flag, and why ours is another."""

    theirs: Any
    why: str


OTHER_DEFAULTS = {
    "--num-query-groups": OtherDefault(1, "the same with --group-query-attention; else every head has its own"),
    "--transformer-impl": OtherDefault("transformer_engine", "runs without a build"),
    "--data-parallel-sharding-strategy": OtherDefault(
        "optim_grads_params", "the same, where --use-megatron-fsdp reads it"
    ),
    "--distributed-backend": OtherDefault("nccl", "the same on GPUs; gloo on CPU processes"),
    "--eval-interval": OtherDefault(None, "there evaluation is off until it is given; here 0 says so"),
    "--moe-router-load-balancing-type": OtherDefault("aux_loss", "the same, read as one of a list"),
    "--moe-aux-loss-coeff": OtherDefault(0.0, "the same, read as one of a list"),
    "--fp8-recipe": OtherDefault("delayed", "scales are those of the tensor itself, not of the steps before"),
    "--split": OtherDefault(None, "the same, which Megatron fills in later"),
}
"""Flags whose default Megatron's parser gives otherwise."""

OTHER_MEANINGS = {
    "--tokenizer-type": OtherDefault(
        "GPT2BPETokenizer", "the same with --vocab-file and --merge-file, which it needs; else it must be named"
    ),
    "--ckpt-fully-parallel-save": OtherDefault("on", "the files of a rank then do not depend on the others"),
    "--exit-signal-handler": OtherDefault("off", "SIGTERM always saves and stops"),
}
"""Flags that nothing is given for in either parser, and that mean something else then."""


def other_default(flag: str) -> OtherDefault | None:
    """Return Megatron's default of a flag where ours is another; None where it is the same."""
    return OTHER_DEFAULTS.get(flag) or OTHER_MEANINGS.get(flag)
