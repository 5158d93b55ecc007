"""The flags of Mamba-1 mixers."""

from dataclasses import dataclass
from functools import partial

from megatron_ext.config.schema.option import Choice, ReadWith, option

LETTER = "S"
"""Its letter in --hybrid-layer-pattern."""

_PATTERN = ReadWith(
    "hybrid_layer_pattern", "without S in --hybrid-layer-pattern no layer has a selective scan", letters=LETTER
)
_shape = partial(option, resume="shape", read_with=_PATTERN)
_size = partial(_shape, at_least=1)


@dataclass(frozen=True)
class SelectiveScanFlags:
    """Options of Mamba-1 mixers."""

    scan_channels: int | None = _size(None, "Channels of a selective scan (Mamba-1); default 2 x --hidden-size.")
    scan_state_dim: int = _size(16, "Numbers of the state of each channel of a selective scan.")
    scan_conv_kernel_dim: int = _size(4, "Latest positions that the convolution before a selective scan sees.")
    scan_time_step_rank: int | None = _size(
        None,
        "Numbers of a token from which the time steps of a selective scan are projected; default --hidden-size / 16, "
        "rounded up.",
    )
    scan_norm: str = _shape(
        "none",
        "Whether time steps, B and C of a selective scan are normalized by RMSNorm: none, without weights (as "
        "Falcon-Mamba), or with weights (as Jamba).",
        choices=("none", "without-weights", "with-weights"),
    )
    scan_norm_epsilon: float | None = option(
        None,
        "Epsilon of the norms of --scan-norm; default --norm-epsilon.",
        resume="function",
        positive=True,
        read_with=_PATTERN,
    )
    scan_bias: bool = _shape(False, "Give the first and the last projection around a selective scan biases.")
    no_scan_conv_bias: bool = _shape(False, "Leave out the bias of the convolution before a selective scan.")


FLAGS = (("model", SelectiveScanFlags),)
CHOICES = (Choice("hybrid_layer_pattern", LETTER, words="Mamba-1"),)
