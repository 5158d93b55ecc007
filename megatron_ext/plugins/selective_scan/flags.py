"""The flags of Mamba-1 mixers."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import Choice, ReadWith, option

LETTER = "S"
"""Its letter in --hybrid-layer-pattern."""

_PATTERN = ReadWith(
    "hybrid_layer_pattern", "without S in --hybrid-layer-pattern no layer has a selective scan", letters=LETTER
)


@dataclass(frozen=True)
class SelectiveScanFlags:
    """Options of Mamba-1 mixers."""

    scan_channels: int | None = option(
        None,
        "Channels of a selective scan (Mamba-1); default 2 x --hidden-size.",
        resume="shape",
        at_least=1,
        read_with=_PATTERN,
    )
    scan_state_dim: int = option(
        16, "Numbers of the state of each channel of a selective scan.", resume="shape", at_least=1, read_with=_PATTERN
    )
    scan_conv_kernel_dim: int = option(
        4,
        "Latest positions that the convolution before a selective scan sees.",
        resume="shape",
        at_least=1,
        read_with=_PATTERN,
    )
    scan_time_step_rank: int | None = option(
        None,
        "Numbers of a token from which the time steps of a selective scan are projected; default --hidden-size / 16, "
        "rounded up.",
        resume="shape",
        at_least=1,
        read_with=_PATTERN,
    )
    scan_norm: str = option(
        "none",
        "Whether time steps, B and C of a selective scan are normalized by RMSNorm: none, without weights (as "
        "Falcon-Mamba), or with weights (as Jamba).",
        resume="shape",
        choices=("none", "without-weights", "with-weights"),
        read_with=_PATTERN,
    )
    scan_norm_epsilon: float | None = option(
        None,
        "Epsilon of the norms of --scan-norm; default --norm-epsilon.",
        resume="function",
        positive=True,
        read_with=_PATTERN,
    )
    scan_bias: bool = option(
        False,
        "Give the first and the last projection around a selective scan biases.",
        resume="shape",
        read_with=_PATTERN,
    )
    no_scan_conv_bias: bool = option(
        False,
        "Leave out the bias of the convolution before a selective scan.",
        resume="shape",
        read_with=_PATTERN,
    )


FLAGS = (("model", SelectiveScanFlags),)
CHOICES = (Choice("hybrid_layer_pattern", LETTER, words="Mamba-1"),)
