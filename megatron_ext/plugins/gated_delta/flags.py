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
        "Layers with a gated delta rule instead of attention (--experimental-attention-variant). N: N - 1 such "
        "layers, then one with attention; a list such as [1,1,1,0]*12: layers marked 1.",
        resume="shape",
        metavar="N|LIST",
        read_with=_VARIANT,
    )
    linear_conv_kernel_dim: int = option(
        4,
        "Kernel size, in positions, of the short convolution of gated delta rules and Mamba-2.",
        resume="shape",
        at_least=1,
        read_with=_CONVOLUTION,
    )
    linear_key_head_dim: int = option(
        128, "Gated delta rule: channels of each query and key head.", resume="shape", at_least=1, read_with=_VARIANT
    )
    linear_value_head_dim: int = option(
        128, "Gated delta rule: channels of each value head.", resume="shape", at_least=1, read_with=_VARIANT
    )
    linear_num_key_heads: int = option(
        16, "Gated delta rule: number of query and key heads.", resume="shape", at_least=1, read_with=_VARIANT
    )
    linear_num_value_heads: int = option(
        32,
        "Gated delta rule: number of value heads; several may share a key head.",
        resume="shape",
        at_least=1,
        read_with=_VARIANT,
    )
    linear_norm_epsilon: float | None = option(
        None,
        "Gated delta rule: epsilon of the norm of each head's output; default --norm-epsilon.",
        resume="function",
        positive=True,
        read_with=_VARIANT,
    )
    linear_allow_neg_eigval: bool = option(
        False,
        "Gated delta rule: write strengths up to 2 instead of 1, so that a state's eigenvalues may be negative "
        "(arXiv:2411.12537).",
        resume="function",
        read_with=_VARIANT,
    )
    recurrence_kernels: str = option(
        "torch",
        "Kernels of gated delta rules and Mamba-2: torch's operations, or on GPUs fla-core's Triton kernels (pip "
        "install fla-core), which nobody has run on a GPU with this program.",
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
