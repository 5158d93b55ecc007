"""Holds what families with Mamba-2 layers have in common. Of the range of time steps (`time_step_min` and others) these
say how weights begin; transformers 5.23 bounds the steps of nemotron_h by `time_step_min` besides, in whole sequences
but not token by token; neither Megatron-LM nor `mamba_ssm` does, nor do we: files that we write say 1e-20."""

import json
import math
from typing import Any, NamedTuple

from megatron_ext.config.derived.layer_patterns import ATTENTION
from megatron_ext.config.schema import Config, ModelConfig, flags_of
from megatron_ext.plugins.families.family import Sections
from megatron_ext.plugins.families.reading import Reading
from megatron_ext.plugins.gated_delta.flags import GatedDeltaFlags
from megatron_ext.plugins.mamba.flags import MambaFlags

MAMBA_SECTIONS = {
    "self_attention.in_proj": Sections((5,), by_groups=False, order=(3, 0, 1, 2, 4)),
    "self_attention.conv1d": Sections((3,), by_groups=False),
}
"""Order of the rows in the Hugging Face tensors: z, x, B, C and time steps, each of all groups."""

_BEGINNINGS = ("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "rescale_prenorm_residual")
_UNLIMITED = (None, [0.0, {"__float__": "Infinity"}], [0.0, float("inf")])


class MambaKeys(NamedTuple):
    """A family's names of the keys of `config.json` that describe a Mamba-2 layer."""

    state: str
    head: str
    groups: str
    heads: str
    kernel: str
    chunk: str
    expand: str
    convolution_bias: str
    bias: str
    activation: str
    fills: bool = True
    """Whether the channels of all heads must be `expand` times the hidden size."""


MAMBA_KEYS = MambaKeys(
    *("mamba_d_state", "mamba_d_head", "mamba_n_groups", "mamba_n_heads", "mamba_d_conv", "mamba_chunk_size"),
    *("mamba_expand", "mamba_conv_bias", "mamba_proj_bias", "hidden_act"),
)
"""Keys of Mamba-2 layers next to attention, whose keys have names without `mamba_`."""


def mamba_names(module: str) -> dict[str, tuple[str, ...]]:
    """Return the names of a layer's Mamba-2 mixer, which is the Hugging Face module `module`."""
    names = {"conv1d": "conv1d", "out_norm": "norm", "in_proj": "in_proj", "out_proj": "out_proj"}
    names |= {vector: vector for vector in ("dt_bias", "A_log", "D")}
    return {f"self_attention.{ours}": (f"{module}.{theirs}",) for ours, theirs in names.items()}


BACKBONE_NAMES = {
    **{"embedding.word_embeddings": ("backbone.embeddings",), "input_layernorm": ("norm",)},
    **{"decoder.final_layernorm": ("backbone.norm_f",), "output_layer": ("lm_head",), **mamba_names("mixer")},
}
"""Names of models whose layers are each a norm and a `mixer`."""


def mamba_values(reading: Reading, keys: MambaKeys) -> dict[str, Any]:
    """Return the values of the flags of Mamba-2 layers."""
    heads, hidden = reading.integer(keys.heads), reading.integer("hidden_size")
    expand = reading.integer(keys.expand, 2)
    if reading.get(keys.head) == "auto":
        reading = reading.changed(**{keys.head: expand * hidden // heads})
    values = {
        "mamba_state_dim": reading.integer(keys.state),
        "mamba_head_dim": reading.integer(keys.head),
        "mamba_num_groups": reading.integer(keys.groups),
        "mamba_num_heads": heads,
        "linear_conv_kernel_dim": reading.integer(keys.kernel, 4),
    }
    if heads % values["mamba_num_groups"]:
        reading.problems.append(f"{keys.heads} {heads} is not divisible by {keys.groups} {values['mamba_num_groups']}")
    if keys.fills and heads * values["mamba_head_dim"] != expand * hidden:
        reading.problems.append(
            f"{keys.heads} {heads} x {keys.head} {values['mamba_head_dim']} is not {keys.expand} {expand} x "
            f"hidden_size {hidden}"
        )
    for key, wanted in ((keys.convolution_bias, True), (keys.bias, False), (keys.activation, "silu")):
        reading.refuse_unless(key, wanted, wanted, f"only {json.dumps(wanted)} is supported")
    if (limit := reading.get("time_step_limit")) not in _UNLIMITED:
        reading.problems.append(f"time_step_limit is {json.dumps(limit)}, but time steps have no limit here")
    reading.understand(keys.chunk, "residual_in_fp32", *_BEGINNINGS)
    return values


def mamba_json(config: Config, keys: MambaKeys) -> dict[str, Any]:
    """Return the keys that `mamba_values` reads."""
    model, mamba = config.model, flags_of(config.model, MambaFlags)
    # Without attention transformers 5.23 asks a cache of recurrences alone how long it is, and stops.
    cached = {} if ATTENTION in (model.hybrid_layer_pattern or "") else {"use_cache": False}
    return {
        **cached,
        keys.state: mamba.mamba_state_dim,
        keys.head: mamba.mamba_head_dim,
        keys.groups: mamba.mamba_num_groups,
        keys.heads: mamba.mamba_num_heads,
        keys.kernel: flags_of(model, GatedDeltaFlags).linear_conv_kernel_dim,
        keys.expand: _expand(model),
        keys.convolution_bias: True,
        keys.bias: False,
        keys.activation: "silu",
    }


def letters(reading: Reading, kinds: dict[str, str], text: str | None = None) -> str:
    """Return the letters of the layers.

    Args:
        kinds: word of `layer_types` -> letter.
        text: key of a text of letters, which may take the place of the list.
    """
    named, written = reading.get("layer_types"), None if text is None else reading.get(text)
    if isinstance(named, list) and named and {*map(str, named)} <= {*kinds}:
        listed = "".join(kinds[str(one)] for one in named)
        if written not in (None, listed):
            reading.problems.append(f"{text} is {json.dumps(written)[:80]}, but the list of layers is {listed}")
        return listed
    if isinstance(written, str) and written and {*written} <= {*kinds.values()} and named is None:
        return written
    given = json.dumps(named if named is not None or text is None else written)[:80]
    key = next((one for one in ("layers_block_type", text) if one in reading.content), "layer_types")
    reading.problems.append(f"{key} is {given}; supported is a list of {', '.join(kinds)}")
    return "M"


def whole_expansion(model: ModelConfig) -> dict[str, Any]:
    """Return heads whose channels are a multiple of the hidden size (`Family.dependent_flags`)."""
    channels = _expand(model) * model.hidden_size
    head = math.gcd(channels, flags_of(model, MambaFlags).mamba_head_dim)
    return {"mamba_num_heads": channels // head, "mamba_head_dim": head}


def _expand(model: ModelConfig) -> int:
    mamba = flags_of(model, MambaFlags)
    return max(
        (mamba.mamba_num_heads or 1) * mamba.mamba_head_dim // model.hidden_size,
        1,
    )
