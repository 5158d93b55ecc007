"""The flags of Mamba-2 mixers."""

from dataclasses import dataclass

from megatron_ext.config.schema.option import Choice, ReadWith, option

LETTER, BESIDE_ATTENTION = "M", "B"
"""Its letters in --hybrid-layer-pattern: alone, and side by side with attention, which Megatron has no letter for."""

PATTERN = ReadWith(
    "hybrid_layer_pattern",
    "without M or B in --hybrid-layer-pattern no layer is Mamba-2",
    letters=LETTER + BESIDE_ATTENTION,
)


@dataclass(frozen=True)
class MambaFlags:
    """Options of Mamba-2 mixers."""

    mamba_state_dim: int = option(
        128, "Numbers of the state for each channel of a Mamba-2 head.", resume="shape", at_least=1, read_with=PATTERN
    )
    mamba_head_dim: int = option(64, "Channels of a Mamba-2 head.", resume="shape", at_least=1, read_with=PATTERN)
    mamba_num_groups: int = option(
        8, "Groups of Mamba-2 heads that share B and C.", resume="shape", at_least=1, read_with=PATTERN
    )
    mamba_num_heads: int | None = option(
        None,
        "Number of Mamba-2 heads; default 2 x --hidden-size / --mamba-head-dim.",
        resume="shape",
        at_least=1,
        read_with=PATTERN,
    )
    mamba_norm: str = option(
        "after-gate",
        "Mamba-2: output norm after the gate or before it, or no norm.",
        resume="shape",
        choices=("after-gate", "before-gate", "none"),
        read_with=PATTERN,
    )
    mamba_multipliers: tuple[float, ...] | None = option(
        None,
        "Mamba-2: factors of the five parts of the input projection, as in Falcon-H1: gate, x, B, C, time steps; "
        "default 1.",
        resume="function",
        read_with=PATTERN,
    )


FLAGS = (("model", MambaFlags),)
CHOICES = (Choice("hybrid_layer_pattern", LETTER, words="Mamba-2"),)
