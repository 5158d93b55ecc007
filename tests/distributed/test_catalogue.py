"""The catalogue against the model that megatron-core builds: names, shapes, attributes and values, in every layout."""

import functools
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from megatron_ext.config.derived.rank_order import expert_coordinates
from megatron_ext.config.schema import Config, ModelConfig
from megatron_ext.forkserver.ranks import run_ranks
from megatron_ext.model.names import by_expert, global_named_parameters
from megatron_ext.parts import stack as config_layers
from megatron_ext.parts.catalogue import Parameter, count_per_rank, parameters, stages, states, tensor_size
from megatron_ext.parts.stack import Layer, stack
from tests.support.several_models import in_turn
from tests.support.small_models import (
    CONVOLUTIONS,
    DELTA,
    INDEXED,
    LATENTS,
    LLAMA,
    MAMBA,
    OLMO2,
    SCAN,
    build_small_model,
    small_config,
)

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2": {"tensor_model_parallel_size": 2},
    "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "TP4 SP": {"tensor_model_parallel_size": 4, "sequence_parallel": True},
    "PP2": {"pipeline_model_parallel_size": 2},
    "PP2 VPP2": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
    "PP2 VPP2, E|ttt|t|L": {
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "pipeline_model_parallel_layout": "E|t*3|t|L",
    },
    "TP2 PP2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "TP2 SP": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "EP2 PP2": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "data_parallel_size": 2},
    "TP2 SP EP2 ETP1": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
    "TP2 SP EP2 ETP2 DP2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "data_parallel_size": 2,
    },
}
MODELS: dict[str, dict[str, Any]] = {
    "GPT-2": {},
    "Llama": LLAMA,
    "tied Llama, qk-norm, QKV bias": {
        **LLAMA,
        "untie_embeddings_and_output_weights": False,
        "qk_layernorm": True,
        "add_qkv_bias": True,
    },
    "untied GPT-2, qk-norm, squared ReLU": {
        "untie_embeddings_and_output_weights": True,
        "qk_layernorm": True,
        "squared_relu": True,
        "position_embedding_type": "none",
    },
}
MODELS["OPT"] = {"relu": True, "position_embedding_offset": 2}
MODELS["OLMo-2"] = OLMO2
MODELS["latents"] = LATENTS
MODELS["latents of keys alone, biases"] = {**LATENTS, "q_lora_rank": None, "disable_bias_linear": False}
MODELS["chosen keys"] = INDEXED
MODELS["delta rules"] = DELTA
MODELS["delta rules with LayerNorm"] = {**DELTA, "normalization": "LayerNorm"}
MODELS["short convolutions"] = {**CONVOLUTIONS, "conv_bias": True}
MODELS["selective scans"] = {**SCAN, "scan_bias": True}
MODELS["letters"] = {**MAMBA, "mamba_num_groups": 4, "mamba_num_heads": 8}
MODELS["side by side"] = {**MODELS["letters"], "hybrid_layer_pattern": "B-BM", "mamba_norm": "none"}
MODELS["sinks and gates"] = {
    **LLAMA,
    "softmax_type": "learnable",
    "attention_output_gate": True,
    "norm_position": "both",
    "embed_layernorm": True,
}
MODELS["heads by layer"] = {
    **{**LLAMA, "window_size": "3,0", "window_attn_skip_freq": "2", "num_query_groups_local": 4, "value_channels": 12},
    **{"softmax_type_local": "learnable", "value_multiplier": 0.7, "add_qkv_bias": True},
}
MODELS["gates of heads"] = {**LLAMA, "attention_output_gate": True, "attention_output_gate_over": "head"}
MODELS["GPT-2 in parallel through one norm, bias of the logits"] = {
    "parallel_residual": "one-norm",
    "lm_head_bias": True,
}
MODELS["Llama in parallel through two norms"] = {**LLAMA, "parallel_residual": "two-norms"}
MODELS["GPT-2 with a norm of embeddings"] = {"embed_layernorm": True}
_AHEAD = {"two tokens ahead": {**LLAMA, "mtp_num_layers": 2}, "one token ahead, tied": {**LLAMA, "mtp_num_layers": 1}}
_AHEAD["three tokens ahead by one layer"] = {**LLAMA, "mtp_num_layers": 3, "mtp_use_repeated_layer": True}
_AHEAD["one token ahead, tied"]["untie_embeddings_and_output_weights"] = False
_AHEAD["letters, two tokens ahead"] = {**MODELS["letters"], "mtp_num_layers": 2, "mtp_hybrid_override_pattern": "M-*"}
MODELS |= _AHEAD
OF_EXPERTS = EXPERTS, BIASED_EXPERTS = "experts", "experts with biases"
ALL_MODELS = {
    **MODELS,
    EXPERTS: {
        **LLAMA,
        "num_experts": 4,
        "moe_ffn_hidden_size": 24,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 20,
        "mtp_num_layers": 1,
    },
    BIASED_EXPERTS: {
        **{"disable_bias_linear": False, "num_experts": 4, "moe_ffn_hidden_size": 24, "quick_geglu": True},
        **{"norm_position": "after-experts", "moe_layer_freq": "2"},
    },
}
FEW, MANY = 2, 4
"""Layers of one chunk a stage, and of two."""
CASES = [(layout, model) for model in MODELS for layout in LAYOUTS] + [
    (layout, model) for model in OF_EXPERTS for layout in EXPERT_LAYOUTS
]
CASES = [(layout, model) for layout, model in CASES if not (model in _AHEAD and layout.endswith("|L"))]  # refused
LAYOUTS["PP2 VPP2, E|ttt|t|mL"] = {
    **LAYOUTS["PP2 VPP2, E|ttt|t|L"],
    "pipeline_model_parallel_layout": "E|t*3|t|mL",
}
CASES.append(("PP2 VPP2, E|ttt|t|mL", "one token ahead, tied"))


@dataclass(frozen=True)
class Built:
    """What one rank says of one parameter that it holds."""

    shape: tuple[int, ...]
    tp_dim: int | None
    tp_stride: int
    sequence_parallel: bool
    dtype: str
    shard_hash: str
    """Of the values, or of the part of the whole tensor that lies on this rank."""


@dataclass(frozen=True)
class Place:
    """Of a rank, as megatron-core's groups have it."""

    pp: int
    tp: int
    etp: int
    ep: int


def _describe(config: Config) -> tuple[Place, dict[str, Built]]:
    chunks, groups = build_small_model(config)
    built = {}
    for stacked, parameter in global_named_parameters(chunks):
        divided = getattr(parameter, "tensor_model_parallel", False)
        for name, tensor in by_expert(stacked, parameter.data):
            built[name] = Built(
                shape=tuple(tensor.shape),
                # A stack of matrices has one dimension more.
                tp_dim=getattr(parameter, "partition_dim", 0) - (parameter.dim() - tensor.dim()) if divided else None,
                tp_stride=getattr(parameter, "partition_stride", 1),
                sequence_parallel=getattr(parameter, "sequence_parallel", False),
                dtype=str(tensor.dtype),
                shard_hash=_hash(tensor),
            )
    return Place(groups.pp.rank(), groups.tp.rank(), groups.expt_tp.rank(), groups.ep.rank()), built


def _values(config: Config) -> dict[str, torch.Tensor]:
    chunks, _ = build_small_model(config)
    held = (by_expert(name, parameter.data) for name, parameter in global_named_parameters(chunks))
    return {name: tensor.clone() for tensors in held for name, tensor in tensors}


def _hash(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _shard(whole: torch.Tensor, tp_dim: int | None, stride: int, tp_rank: int, tp_size: int) -> torch.Tensor:
    if tp_dim is None:
        return whole
    return torch.cat([part.chunk(tp_size, tp_dim)[tp_rank] for part in whole.chunk(stride, tp_dim)], tp_dim)


@pytest.fixture(scope="module")
def whole_model() -> dict[tuple[str, int], dict[str, torch.Tensor]]:
    """By name and number of layers."""
    cases = [(name, layers) for name in ALL_MODELS for layers in (FEW, MANY) if layers == FEW or name not in OF_EXPERTS]
    configs = [small_config({**ALL_MODELS[name], "num_layers": layers}) for name, layers in cases]
    [models] = run_ranks(1, in_turn, _values, configs)
    return dict(zip(cases, models, strict=True))


def _config(layout: str, model: str) -> Config:
    sizes = dict((EXPERT_LAYOUTS if model in OF_EXPERTS else LAYOUTS)[layout])
    tp, pp = sizes.get("tensor_model_parallel_size", 1), sizes.get("pipeline_model_parallel_size", 1)
    world_size = tp * pp * sizes.pop("data_parallel_size", 1)
    layers = MANY if "num_virtual_stages_per_pipeline_rank" in sizes else FEW
    return small_config({**ALL_MODELS[model], "num_layers": layers}, {**sizes, "world_size": world_size})


@pytest.fixture(scope="module")
def described() -> Callable[[str, str], Sequence[tuple[Place, dict[str, Built]]]]:
    """What each rank holds; the ranks of a number build the models of all cases that have as many, one by one."""
    configs = {case: _config(*case) for case in CASES}

    @functools.cache
    def on_ranks(world_size: int) -> dict[tuple[str, str], Any]:
        cases = [case for case, config in configs.items() if config.layout.world_size == world_size]
        by_rank = run_ranks(world_size, in_turn, _describe, [configs[case] for case in cases])
        return dict(zip(cases, zip(*by_rank, strict=True), strict=True))

    return lambda layout, model: on_ranks(configs[layout, model].layout.world_size)[layout, model]


@pytest.mark.first(*(f"{layout}-{model}" for layout, model in CASES if layout == "TP2" or "|mL" in layout))
@pytest.mark.parametrize(("layout", "model"), CASES)
def test_catalogue_is_the_model(layout: str, model: str, whole_model: Any, described: Any) -> None:
    config = _config(layout, model)
    for rank, (place, built) in enumerate(described(layout, model)):
        assert (place.etp, place.ep) == expert_coordinates(config.layout, rank)[:2]
        expected = {}
        for parameter in parameters(config):
            if place.pp not in stages(config, parameter) or not _holds(config, parameter, place.ep):
                continue
            size, index = tensor_size(config, parameter), place.tp if parameter.expert is None else place.etp
            whole = whole_model[model, config.model.num_layers][parameter.name]
            expected[parameter.name] = Built(
                shape=parameter.local_shape(size),
                tp_dim=parameter.tp_dim,
                tp_stride=parameter.tp_stride,
                sequence_parallel=parameter.sequence_parallel and config.layout.sequence_parallel,
                dtype="torch.float32",
                shard_hash=_hash(_shard(whole, parameter.tp_dim, parameter.tp_stride, index, size)),
            )
        assert built == expected
        assert sum(math.prod(tensor.shape) for tensor in built.values()) == count_per_rank(config)[place.pp]


def _dense_first(model: ModelConfig, number: int) -> Layer:
    """A description that no flag gives yet: an MLP in the first two layers, and mixtures of experts after them."""
    layer = _LAYER(model, number)
    return layer if number > 1 else replace(layer, mlp=config_layers.mlp_of(model, model.ffn_hidden_size))


_LAYER = config_layers._layer


def _shapes_of_dense_first(config: Config) -> tuple[int, dict[str, tuple[int, ...]]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_layers, "_layer", _dense_first)
        place, built = _describe(config)
    return place.pp, {name: parameter.shape for name, parameter in built.items()}


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_stage_builds_its_own_kinds_of_layers(chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": chunks, "world_size": 2}
    # An epsilon of its own: nothing that other tests remember of a model is of this one.
    config = small_config({**ALL_MODELS[EXPERTS], "norm_epsilon": 7e-5, "mtp_num_layers": None}, layout)
    built = run_ranks(2, _shapes_of_dense_first, config)
    monkeypatch.setattr(config_layers, "_layer", _dense_first)
    catalogue = parameters(config)
    assert {p.stage for p in catalogue if p.expert is not None} == {2, 3}
    for stage, shapes in built:
        assert shapes == {p.name: p.shape for p in catalogue if stage in stages(config, p)}


def _holds(config: Config, parameter: Parameter, ep_rank: int) -> bool:
    if parameter.expert is None:
        return True
    assert config.model.num_experts is not None
    return parameter.expert // (config.model.num_experts // config.layout.expert_model_parallel_size) == ep_rank


def test_bf16_weights_are_the_rounded_fp32_ones(whole_model: Any) -> None:
    configs = [small_config({**model, "num_layers": FEW}, training={"bf16": True}) for model in ALL_MODELS.values()]
    [models] = run_ranks(1, in_turn, _values, configs)
    for model, values in zip(ALL_MODELS, models, strict=True):
        assert values.keys() == whole_model[model, FEW].keys()
        for name, value in values.items():
            assert value.dtype == torch.bfloat16
            assert torch.equal(value, whole_model[model, FEW][name].bfloat16()), (model, name)


def _saved_besides_parameters(config: Config) -> set[str]:
    """The keys of what a checkpoint holds of the layers and is no parameter, as one process would save it."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    [chunk], _ = build_small_model(config)
    saved: dict[str, Any] = chunk.sharded_state_dict(metadata={"dp_cp_group": None})
    return {value.unique_key for value in saved.values() if isinstance(value, ShardedObject)}


WITH_STATE = (
    "GPT-2",
    "Llama",
    "OLMo-2",
    "latents",
    "chosen keys",
    "delta rules",
    "short convolutions",
    "selective scans",
    "letters",
    "letters, two tokens ahead",
    EXPERTS,
)


@pytest.mark.parametrize("model", WITH_STATE)
def test_the_catalogue_knows_what_is_saved_besides_parameters(model: str) -> None:
    config = small_config({**ALL_MODELS[model], "num_layers": FEW})
    [saved] = run_ranks(1, _saved_besides_parameters, config)
    named = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
    found = {state.name: named.fullmatch(state.name) for state in states(config)}
    if stack(config).has_mixed_parameters:
        assert saved == {f"{name}/shard_0_1" for name in found}
        return
    stacked = {f"decoder.layers.{one[2]}/shard_{one[1]}_{FEW}" for one in found.values() if one is not None}
    assert saved == stacked | {f"{name}/shard_0_1" for name, one in found.items() if one is None}
