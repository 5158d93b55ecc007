"""The flags of gated short convolutions, by the names that LFM2's configuration has in transformers."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import Choice, ReadWith, option

LETTER = "C"
"""Its letter in --hybrid-layer-pattern."""

_CONVOLUTION = ReadWith(
    ("full_attn_idxs", "hybrid_layer_pattern"),
    "without --full-attn-idxs, or C in --hybrid-layer-pattern, no layer is a gated short convolution",
    letters=LETTER,
)


@dataclass(frozen=True)
class ShortConvolutionFlags:
    """Options of gated short convolutions."""

    full_attn_idxs: tuple[int, ...] | None = option(
        None,
        "Indices, from 0, of the layers with attention in a model whose other layers mix positions by a gated short "
        "convolution, as LFM2's do.",
        resume="shape",
        at_least=0,
        metavar="LAYER",
        computed_by_ours=True,
    )
    conv_l_cache: int = option(
        3,
        "Latest positions that a gated short convolution sees, its own included.",
        resume="shape",
        at_least=1,
        aliases=("--conv-L-cache",),
        read_with=_CONVOLUTION,
    )
    conv_bias: bool = option(
        False,
        "Give the projections and the convolution of a gated short convolution biases.",
        resume="shape",
        read_with=_CONVOLUTION,
    )


FLAGS = (("model", ShortConvolutionFlags),)
CHOICES = (Choice("hybrid_layer_pattern", LETTER, words="gated short convolution"),)
