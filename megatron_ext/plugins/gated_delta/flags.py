"""The flags of gated delta rules; Mamba-2 shares their convolution and their kernels."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import Choice, Need, ReadWith, option

VARIANTS = ("gated_delta_net", "kda")
"""Values of --experimental-attention-variant that are gated delta rules."""

LETTER = "G"
"""Its letter in --hybrid-layer-pattern."""

_VARIANT = ReadWith(
    ("experimental_attention_variant", "hybrid_layer_pattern"),
    "without --experimental-attention-variant gated_delta_net or kda, or G in --hybrid-layer-pattern, no layer has a "
    "delta rule",
    only=VARIANTS,
    letters="G",
)
_RECURRENCE = (
    "without --experimental-attention-variant gated_delta_net or kda, or G, M or B in --hybrid-layer-pattern, no layer "
)
_CONVOLUTION = ReadWith(_VARIANT.fields, f"{_RECURRENCE}has a convolution", only=VARIANTS, letters="GMB")
_KERNELS = ReadWith(_VARIANT.fields, f"{_RECURRENCE}has a recurrence", only=VARIANTS, letters="GMB")


@dataclass(frozen=True)
class GatedDeltaFlags:
    """Options of gated delta rules."""

    linear_attention_freq: str | None = option(
        None,
        "Which layers have it. N: N - 1 layers with it and one with attention, in turn; a list such as [1,1,1,0]*12: "
        "those with a 1.",
        resume="shape",
        metavar="N|LIST",
        read_with=_VARIANT,
    )
    linear_conv_kernel_dim: int = option(
        4,
        "Latest positions that its convolution sees, or Mamba-2's.",
        resume="shape",
        at_least=1,
        read_with=_CONVOLUTION,
    )
    linear_key_head_dim: int = option(
        128, "Channels of its query and key heads.", resume="shape", at_least=1, read_with=_VARIANT
    )
    linear_value_head_dim: int = option(
        128, "Channels of its value heads.", resume="shape", at_least=1, read_with=_VARIANT
    )
    linear_num_key_heads: int = option(
        16, "Number of its query and key heads.", resume="shape", at_least=1, read_with=_VARIANT
    )
    linear_num_value_heads: int = option(
        32, "Number of its value heads, which share key heads.", resume="shape", at_least=1, read_with=_VARIANT
    )
    linear_norm_epsilon: float | None = option(
        None,
        "Epsilon inside the norm of what its heads give; default --norm-epsilon.",
        resume="function",
        positive=True,
        read_with=_VARIANT,
    )
    linear_allow_neg_eigval: bool = option(
        False,
        "Let a write go twice as far, to the opposite of what is read at its key (arXiv:2411.12537).",
        resume="function",
        read_with=_VARIANT,
    )
    recurrence_kernels: str = option(
        "torch",
        "What computes gated delta rules and Mamba-2 between their projections: torch's operations, or on GPUs the "
        "Triton kernels of fla-core, which nobody has run on a GPU with this program (pip install fla-core).",
        resume="free",
        choices=("torch", "fla"),
        needs={
            "fla": [
                Need("deterministic_mode", False, "blocks chosen by time, which may round otherwise in the next run")
            ]
        },
        read_with=_VARIANT,
        packages={"fla": "fla"},
        needs_gpu=("fla",),
        untried_with_graphs=True,
    )


FLAGS = (("model", GatedDeltaFlags),)
CHOICES = (
    *(
        Choice("experimental_attention_variant", name, (Need("disable_bias_linear", True, "projections without bias"),))
        for name in VARIANTS
    ),
    Choice("hybrid_layer_pattern", LETTER, words="Gated DeltaNet"),
)
