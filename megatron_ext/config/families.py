"""Model families of Hugging Face: how each names, arranges and divides the parameters that we have.

    family = family_of(config)                         # or FAMILIES["llama"]
    for parameter in arrangement(config, family):
        print(parameter.name, [run.tensor for run in parameter.runs])

One row of a family's table gives a module of ours and the module, or modules, that hold the same rows there. Fused
matrices need no code of their own: a parameter is a list of runs of rows of Hugging Face tensors, and whoever moves
tensors (`checkpoint/hf_*.py`) copies runs, in either direction and in any slice. What a family's `config.json` says
is `config/hf_config.py`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.config.layers import Attention, layers, stack
from megatron_ext.config.options import flag_of
from megatron_ext.config.parameters import Parameter, parameters
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.errors import ConfigurationError

_LAYER = "decoder.layers."
_QKV = "self_attention.linear_qkv"


@dataclass(frozen=True)
class Family:
    model_type: str
    """As in `config.json`."""

    architecture: str
    """The class of transformers, as in `config.json`."""

    names: Mapping[str, tuple[str, ...]]
    """Module of ours (in a layer, without the layer's prefix) -> modules there whose rows it holds, in this order.
    One name for the fused QKV: queries, keys and values lie one above the other there."""

    flags: Mapping[str, Any]
    """Values of our flags that every model of the family has."""

    layers: str = "model.layers.{}."
    """Prefix of a layer's modules."""

    transposed: frozenset[str] = frozenset()
    """Modules of ours whose weight lies transposed there."""

    experts: bool = False
    """Whether each layer's MLP is a mixture of experts. `{}` in the names of their modules is the expert's index."""


@dataclass(frozen=True)
class Run:
    """Rows `start` to `start + count` of a parameter are rows `tensor_start` and on of a Hugging Face tensor."""

    tensor: str
    tensor_start: int
    start: int
    count: int


@dataclass(frozen=True)
class Arranged:
    """Where the rows of one parameter lie. Rows that no run covers are vocabulary padding, and zero."""

    parameter: Parameter
    runs: tuple[Run, ...]
    transposed: bool
    """The Hugging Face tensors are [columns, rows] of the parameter."""

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of the Hugging Face tensors that hold this parameter."""
        rows: dict[str, int] = {}
        for run in self.runs:
            rows[run.tensor] = rows.get(run.tensor, 0) + run.count
        columns = self.parameter.shape[1:]
        return {name: (*columns, count) if self.transposed else (count, *columns) for name, count in rows.items()}


_DECODER_NAMES: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings": ("model.embed_tokens",),
    "input_layernorm": ("input_layernorm",),
    _QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.q_layernorm": ("self_attn.q_norm",),
    "self_attention.k_layernorm": ("self_attn.k_norm",),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "pre_mlp_layernorm": ("post_attention_layernorm",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
    "decoder.final_layernorm": ("model.norm",),
    "output_layer": ("lm_head",),
}
_EXPERT = "mlp.experts."
_NO_MLP = {name: theirs for name, theirs in _DECODER_NAMES.items() if not name.startswith("mlp.")}
_MIXTRAL_NAMES: dict[str, tuple[str, ...]] = {
    **_NO_MLP,
    "mlp.router": ("block_sparse_moe.gate",),
    "mlp.experts.linear_fc1": ("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    "mlp.experts.linear_fc2": ("block_sparse_moe.experts.{}.w2",),
}
_QWEN3_MOE_NAMES: dict[str, tuple[str, ...]] = {
    **_NO_MLP,
    "mlp.router": ("mlp.gate",),
    "mlp.experts.linear_fc1": ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    "mlp.experts.linear_fc2": ("mlp.experts.{}.down_proj",),
}
_EXPERT_FLAGS = {"moe_shared_expert_intermediate_size": None, "moe_router_score_function": "softmax"}
_DECODER_FLAGS = {
    "position_embedding_type": "rope",
    "rotary_percent": 1.0,
    "swiglu": True,
    "normalization": "RMSNorm",
}
_GPT2_NAMES: dict[str, tuple[str, ...]] = {
    "embedding.word_embeddings": ("transformer.wte",),
    "embedding.position_embeddings": ("transformer.wpe",),
    "input_layernorm": ("ln_1",),
    _QKV: ("attn.c_attn",),
    "self_attention.linear_proj": ("attn.c_proj",),
    "pre_mlp_layernorm": ("ln_2",),
    "mlp.linear_fc1": ("mlp.c_fc",),
    "mlp.linear_fc2": ("mlp.c_proj",),
    "decoder.final_layernorm": ("transformer.ln_f",),
    "output_layer": ("lm_head",),
}
_GPT2_FLAGS = {
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "squared_relu": False,
    "normalization": "LayerNorm",
    "disable_bias_linear": False,
    "group_query_attention": False,
    "qk_layernorm": False,
}

# In the order in which a configuration that fits several is given one.
FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "LlamaForCausalLM",
            _DECODER_NAMES,
            {**_DECODER_FLAGS, "qk_layernorm": False, "add_qkv_bias": False},
        ),
        Family(
            "mistral",
            "MistralForCausalLM",
            _DECODER_NAMES,
            {**_DECODER_FLAGS, "qk_layernorm": False, "add_qkv_bias": False, "disable_bias_linear": True},
        ),
        Family(
            "qwen2",
            "Qwen2ForCausalLM",
            _DECODER_NAMES,
            {**_DECODER_FLAGS, "qk_layernorm": False, "add_qkv_bias": True, "disable_bias_linear": True},
        ),
        Family(
            "qwen3",
            "Qwen3ForCausalLM",
            _DECODER_NAMES,
            {**_DECODER_FLAGS, "qk_layernorm": True, "add_qkv_bias": False, "disable_bias_linear": True},
        ),
        Family(
            "mixtral",
            "MixtralForCausalLM",
            _MIXTRAL_NAMES,
            {
                **_DECODER_FLAGS,
                **_EXPERT_FLAGS,
                "qk_layernorm": False,
                "add_qkv_bias": False,
                "disable_bias_linear": True,
                "moe_router_pre_softmax": False,
            },
            experts=True,
        ),
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            _QWEN3_MOE_NAMES,
            {
                **_DECODER_FLAGS,
                **_EXPERT_FLAGS,
                "qk_layernorm": True,
                "add_qkv_bias": False,
                "disable_bias_linear": True,
            },
            experts=True,
        ),
        Family(
            "gpt2",
            "GPT2LMHeadModel",
            _GPT2_NAMES,
            _GPT2_FLAGS,
            layers="transformer.h.{}.",
            transposed=frozenset({_QKV, "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}),
        ),
    )
}


def family_of(config: Config) -> Family:
    """The family that the configuration is shape-equal to.

    Raises:
        ConfigurationError: there is none; it names the flags that stand in the way of the nearest one.
    """
    found = {family.model_type: obstacles(config, family) for family in FAMILIES.values()}
    mixture = any(layer.experts is not None for layer, _ in stack(config).kinds)
    nearest = min(found, key=lambda model_type: (FAMILIES[model_type].experts != mixture, len(found[model_type])))
    if found[nearest]:
        raise ConfigurationError(
            f"no Hugging Face family has this model's shape; the nearest is {nearest}, which has "
            f"{', '.join(found[nearest])}. Train with the flags of a family to export to it (docs/huggingface.md)"
        )
    return FAMILIES[nearest]


def obstacles(config: Config, family: Family) -> list[str]:
    """What the family has and the configuration has not, each as a flag."""
    model = _normalized(config.model)
    wanted = dict(family.flags)
    if family.model_type == "gpt2":
        wanted["kv_channels"] = model.hidden_size // model.num_attention_heads
    found = [
        _difference(name, value, getattr(model, name))
        for name, value in wanted.items()
        if getattr(model, name) != value
    ]
    if any(family.experts != (layer.experts is not None) for layer, _ in stack(config).kinds):
        found.append("--num-experts" if family.experts else "no --num-experts")
    return found


def arrangement(config: Config, family: Family) -> list[Arranged]:
    """Every parameter of the model, with the tensors of the family that hold its rows."""
    attention = [layer.attention for layer in layers(config)]
    return [
        _arranged(parameter, attention[parameter.stage] if isinstance(parameter.stage, int) else None, family)
        for parameter in parameters(config)
    ]


def _normalized(model: ModelConfig) -> ModelConfig:
    """Switches that change nothing beside others are put to one form."""
    return dataclasses.replace(
        model,
        add_qkv_bias=model.add_qkv_bias and model.disable_bias_linear,
        group_query_attention=model.num_key_value_heads != model.num_attention_heads,
    )


def _difference(name: str, wanted: Any, given: Any) -> str:
    flag = flag_of(name)
    if wanted is None:
        return f"no {flag}"
    if isinstance(wanted, bool):
        return flag if wanted else f"no {flag}"
    return f"{flag} {wanted:g} (not {given:g})" if isinstance(wanted, float) else f"{flag} {wanted} (not {given})"


def _arranged(parameter: Parameter, attention: Attention | None, family: Family) -> Arranged:
    module, _, kind = parameter.name.rpartition(".")
    prefix = ""
    if module.startswith(_LAYER):
        layer, _, module = module.removeprefix(_LAYER).partition(".")
        prefix = family.layers.format(layer)
    if parameter.expert is not None:
        module = _EXPERT + module.removeprefix(f"{_EXPERT}{parameter.expert}.")
    tensors = [f"{prefix}{name.format(parameter.expert)}.{kind}" for name in family.names[module]]
    rows = parameter.true_rows or parameter.shape[0]
    if module == _QKV:
        assert attention is not None
        runs = tuple(_grouped(tensors, attention))
    else:
        count = rows // len(tensors)
        runs = tuple(Run(tensor, 0, index * count, count) for index, tensor in enumerate(tensors))
    return Arranged(parameter, runs, transposed=kind == "weight" and module in family.transposed)


def _grouped(tensors: list[str], attention: Attention) -> Iterator[Run]:
    """megatron-core's fused QKV: for each query group its query heads, then its key head and its value head."""
    groups, keys, values = attention.groups, attention.head_size, attention.value_head_size
    queries = attention.query_size // groups
    if len(tensors) == 1:
        tensors = tensors * 3
        first_key, first_value = queries * groups, (queries + keys) * groups
    else:
        first_key = first_value = 0
    query, key, value = tensors
    for group in range(groups):
        start = group * (queries + keys + values)
        yield Run(query, group * queries, start, queries)
        yield Run(key, first_key + group * keys, start + queries, keys)
        yield Run(value, first_value + group * values, start + queries + keys, values)
