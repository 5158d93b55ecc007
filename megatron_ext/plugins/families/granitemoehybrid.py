"""Granite 4: granite's factors, and pairs of letters: `M` or `*`, then `-` or `E` with a shared expert; a layer there
is two of ours. Without attention these three are written with `use_cache` false."""

from typing import Any

from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.plugins.families import mamba_layers, shared
from megatron_ext.plugins.families.family import Family, usual_values
from megatron_ext.plugins.families.granite import GRANITES
from megatron_ext.plugins.families.granitemoe import GRANITEMOE
from megatron_ext.plugins.families.reading import Reading

_KINDS = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
_DECODER = shared.keys(shared.decoder(biases="attention"), GRANITES)
_OF_EXPERTS = ("num_experts", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_pre_softmax")
_SHARED, _OURS = "shared_intermediate_size", "moe_shared_expert_intermediate_size"


def _read(reading: Reading) -> dict[str, Any]:
    number = reading.integer("num_hidden_layers")
    if reading.get("layer_types") is None:
        reading = reading.changed(layer_types=["linear_attention"] * len(shared.layer_numbers(reading)))
    mixers = mamba_layers.letters(reading, _KINDS)
    if len(mixers) != number:
        reading.problems.append(f"layer_types has {len(mixers)} layers, but num_hidden_layers is {number}")
    experts, width = reading.integer("num_local_experts", least=0), reading.integer("intermediate_size")
    of_shared, kind = reading.integer(_SHARED), reading.get("position_embedding_type")
    if kind not in (None, "nope", "rope"):
        reading.problems.append(f'position_embedding_type is {str(kind)[:40]}; supported are null, "nope" and "rope"')
    reading.understand("num_experts_per_tok")
    of_experts = {name: usual_values()[name] for name in _OF_EXPERTS}
    if experts:
        of_experts = shared.expert_values(reading, experts, width, normalized=True)
    return {
        **_DECODER[0](reading),
        **mamba_layers.mamba_values(reading, mamba_layers.MAMBA_KEYS),
        **of_experts,
        "position_embedding_type": "rope" if kind == "rope" else "none",
        "num_layers": 2 * number,
        "hybrid_layer_pattern": "".join(mixer + ("E" if experts else "-") for mixer in mixers),
        "ffn_hidden_size": width if experts else of_shared,
        _OURS: of_shared if experts else None,
    }


def _write(config: Config) -> dict[str, Any]:
    model = config.model
    experts, mixers = model.num_experts, (model.hybrid_layer_pattern or "")[::2]
    content = {
        **{
            **_DECODER[1](config),
            **shared.expert_json(config),
            **mamba_layers.mamba_json(config, mamba_layers.MAMBA_KEYS),
        },
        "num_hidden_layers": model.num_layers // 2,
        "layer_types": ["linear_attention" if mixer == "M" else "full_attention" for mixer in mixers],
        "position_embedding_type": "rope" if model.position_embedding_type == "rope" else None,
        "num_local_experts": experts or 0,
        "intermediate_size": model.expert_ffn_hidden_size if experts else model.ffn_hidden_size,
        _SHARED: model.moe_shared_expert_intermediate_size if experts else model.ffn_hidden_size,
    }
    del content["head_dim"]  # which transformers derives
    return content


def _dependent(model: ModelConfig) -> dict[str, Any]:
    pattern = model.hybrid_layer_pattern or "M" * model.num_layers
    mixers = ("*" if one == "*" else "M" for one in pattern[: len(pattern) // 2 * 2 : 2])
    experts = {"moe_router_pre_softmax": False} if model.num_experts is not None else {}
    width = {_OURS: shared.shared_expert_width(model)}
    return {
        **{
            **shared.biases_of_attention(model),
            **shared.heads_fill_width(model),
            **mamba_layers.whole_expansion(model),
        },
        **(experts | width if experts else {}),
        "hybrid_layer_pattern": "".join(mixer + ("E" if experts else "-") for mixer in mixers),
    }


GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    {
        **{**GRANITEMOE.names, **mamba_layers.mamba_names("mamba")},
        **{
            f"mlp.{kind}linear_fc{number}": (f"shared_mlp.{name}_linear",)
            for kind in ("", "shared_experts.")
            for number, name in enumerate(("input", "output"), 1)
        },
    },
    {"swiglu": True, "normalization": "RMSNorm", "disable_bias_linear": True},
    _read,
    _write,
    {
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, "mamba_n_heads": 128},
        **{"mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto", "hidden_size": 4096},
        **{"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000},
    },
    {"layer_types": "layers_block_type"},
    dependent_flags=_dependent,
    may_be_dense=True,
    halves=True,
    sections=mamba_layers.MAMBA_SECTIONS,
)
