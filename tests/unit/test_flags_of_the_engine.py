"""Each flag alone, with a value that is nobody's default: what the engine is given differs in the parameter that the
flag is for, and in no other."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core.activations import squared_relu
from megatron.core.transformer.enums import AttnBackend

from megatron_ext.config.schema import Config, LayoutConfig
from megatron_ext.model import config as model_config
from megatron_ext.optim import settings as optimizer_settings
from megatron_ext.parallel import groups
from megatron_ext.sharding import engine
from megatron_ext.sharding.megatron_fsdp import MegatronFSDP
from tests.support.small_models import small_config

Groups = dict[str, dict[str, Any]]


def _config(flags: Groups) -> Config:
    config = small_config()
    for group, values in flags.items():
        config = dataclasses.replace(config, **{group: dataclasses.replace(getattr(config, group), **values)})
    return config


def _differences(found: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """What is in `found` alone or with another value; what it lacks is `...`."""
    missing = dict.fromkeys(base.keys() - found.keys(), ...)
    return missing | {name: value for name, value in found.items() if name not in base or base[name] != value}


def _merged(one: Groups, other: Groups) -> Groups:
    return {group: {**one.get(group, {}), **other.get(group, {})} for group in one.keys() | other.keys()}


def _named(flags: Groups) -> str:
    return "-".join(f"{name}={value}" for values in flags.values() for name, value in values.items())


def _transformer(flags: Groups, monkeypatch: pytest.MonkeyPatch, kind: str = "cuda", **named: Any) -> dict[str, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(model_config, "TransformerConfig", lambda **given: SimpleNamespace(**given))
        return dict(vars(model_config.transformer_config(_config(flags), kind, **named)))


FUSING: Groups = {"model": {"swiglu": True}}
"""On a GPU all fusions are on with it: whatever switches one off alone shows."""

DENSE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "num_query_groups": 4,
    "kv_channels": 16,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-5,
    "qk_layernorm": False,
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "rotary_interleaved": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "init_method_std": 0.02,
    "perform_initialization": False,
    "use_cpu_initialization": False,
    "tensor_model_parallel_size": 1,
    "sequence_parallel": False,
    "context_parallel_size": 1,
    "cp_comm_type": "p2p",
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "microbatch_group_size_per_vp_stage": 1,
    "pipeline_dtype": torch.float32,
    "params_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    "deterministic_mode": False,
    "calculate_per_token_loss": True,
    "recompute_granularity": None,
    "recompute_modules": ["core_attn"],
    "recompute_method": None,
    "recompute_num_layers": None,
    "batch_p2p_comm": True,
    "batch_p2p_sync": False,
    "overlap_p2p_comm": False,
    "deallocate_pipeline_outputs": True,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": True,
    "bias_activation_fusion": True,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "cross_entropy_loss_fusion": False,
    "cuda_graph_modules": [],
    "transformer_impl": "local",
}

CHUNKS: Groups = {"layout": {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2}}
TE: Groups = {"model": {"transformer_impl": "transformer_engine"}}

OF_THE_MODEL: list[tuple[Groups, Groups, dict[str, Any]]] = [
    ({}, {"model": {"num_layers": 6}}, {"num_layers": 6}),
    ({}, {"model": {"hidden_size": 128}}, {"hidden_size": 128}),
    ({}, {"model": {"ffn_hidden_size": 160}}, {"ffn_hidden_size": 160}),
    ({}, {"model": {"num_attention_heads": 8}}, {"num_attention_heads": 8, "num_query_groups": 8}),
    ({}, {"model": {"num_query_groups": 2}}, {}),
    ({}, {"model": {"num_query_groups": 2, "group_query_attention": True}}, {"num_query_groups": 2}),
    ({}, {"model": {"kv_channels": 24}}, {"kv_channels": 24}),
    ({}, {"model": {"normalization": "RMSNorm"}}, {"normalization": "RMSNorm"}),
    ({}, {"model": {"norm_epsilon": 3e-4}}, {"layernorm_epsilon": 3e-4}),
    ({}, {"model": {"qk_layernorm": True}}, {"qk_layernorm": True}),
    ({}, {"model": {"disable_bias_linear": True}}, {"add_bias_linear": False}),
    ({}, {"model": {"add_qkv_bias": True}}, {"add_qkv_bias": True}),
    (
        {},
        {"model": {"swiglu": False, "squared_relu": True}},
        {"gated_linear_unit": False, "activation_func": squared_relu, "bias_activation_fusion": False},
    ),
    ({}, {"model": {"rotary_interleaved": True}}, {"rotary_interleaved": True}),
    ({}, {"model": {"hidden_dropout": 0.25}}, {"hidden_dropout": 0.25}),
    ({}, {"model": {"attention_dropout": 0.5}}, {"attention_dropout": 0.5}),
    ({}, {"model": {"init_method_std": 0.75}}, {"init_method_std": 0.75}),
    ({}, {"model": {"embedding_init_method_std": 0.75}}, {}),
    ({}, {"layout": {"tensor_model_parallel_size": 4}}, {"tensor_model_parallel_size": 4}),
    ({}, {"layout": {"sequence_parallel": True}}, {"sequence_parallel": True}),
    ({}, {"layout": {"context_parallel_size": 2}}, {"context_parallel_size": 2}),
    ({}, {"layout": {"cp_comm_type": ("a2a",)}}, {"cp_comm_type": "a2a"}),
    (
        {},
        {"layout": {"cp_comm_type": ("p2p", "a2a", "a2a", "p2p")}},
        {"cp_comm_type": ["p2p", "a2a", "a2a", "p2p"]},
    ),
    (
        {},
        {"layout": {"pipeline_model_parallel_size": 2}},
        {"pipeline_model_parallel_size": 2, "microbatch_group_size_per_vp_stage": 2},
    ),
    (
        {},
        {"layout": {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1}},
        {
            "pipeline_model_parallel_size": 2,
            "microbatch_group_size_per_vp_stage": 2,
            "pipeline_model_parallel_layout": [["embedding", "decoder", "decoder", "decoder"], ["decoder", "loss"]],
        },
    ),
    (
        {"layout": {"pipeline_model_parallel_size": 2}},
        {"layout": {"num_virtual_stages_per_pipeline_rank": 2}},
        {"virtual_pipeline_model_parallel_size": 2, "batch_p2p_comm": False, "overlap_p2p_comm": True},
    ),
    (CHUNKS, {"layout": {"no_overlap_p2p_communication": True}}, {"overlap_p2p_comm": False}),
    (
        CHUNKS,
        {"layout": {"microbatch_group_size_per_virtual_pipeline_stage": 6}},
        {"microbatch_group_size_per_vp_stage": 6},
    ),
    ({}, {"layout": {"no_overlap_p2p_communication": True}}, {}),
    (
        {},
        {"training": {"bf16": True}},
        {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
    ),
    ({}, {"training": {"fp16": True}}, {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}),
    ({}, {"training": {"deterministic_mode": True}}, {"deterministic_mode": True}),
    ({}, {"training": {"recompute_granularity": "full"}}, {"recompute_granularity": "full"}),
    ({}, {"training": {"recompute_modules": ("mlp", "layernorm")}}, {"recompute_modules": ["mlp", "layernorm"]}),
    ({}, {"training": {"recompute_method": "block"}}, {"recompute_method": "block"}),
    ({}, {"training": {"recompute_num_layers": 3}}, {"recompute_num_layers": 3}),
    ({}, {"training": {"gradient_accumulation_fusion": True}}, {"gradient_accumulation_fusion": True}),
    (
        {},
        {"training": {"disable_jit_fuser": True}},
        {"bias_dropout_fusion": False, "bias_activation_fusion": False},
    ),
    ({}, {"training": {"no_bias_dropout_fusion": True}}, {"bias_dropout_fusion": False}),
    ({}, {"training": {"no_bias_swiglu_fusion": True}}, {"bias_activation_fusion": False}),
    ({}, {"training": {"attention_backend": "flash"}}, {}),
    ({}, {"training": {"flash_attention_version": 3}}, {}),
    (
        {},
        TE,
        {
            "transformer_impl": "transformer_engine",
            "attention_backend": AttnBackend.auto,
            "flash_attention_version": None,
        },
    ),
    (TE, {"training": {"attention_backend": "flash"}}, {"attention_backend": AttnBackend.flash}),
    (TE, {"training": {"attention_backend": "fused"}}, {"attention_backend": AttnBackend.fused}),
    (TE, {"training": {"attention_backend": "unfused"}}, {"attention_backend": AttnBackend.unfused}),
    (TE, {"training": {"attention_backend": "local"}}, {}),
    (TE, {"training": {"flash_attention_version": 3}}, {"flash_attention_version": 3}),
]
"""What is given before, the flags that are given alone, and what differs then."""

EXPERTS: Groups = {"model": {"swiglu": True, "num_experts": 8}}

OF_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 96,
    "moe_router_topk": 2,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_dtype": None,
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "moe_shared_expert_intermediate_size": None,
    "moe_grouped_gemm": False,
    "moe_token_dispatcher_type": "allgather",
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
}

BALANCED: Groups = _merged(EXPERTS, {"model": {"moe_aux_loss_coeff": (0.125,)}})

OF_THE_MODEL += [
    (EXPERTS, {"model": {"num_experts": 16}}, {"num_moe_experts": 16}),
    (EXPERTS, {"model": {"moe_ffn_hidden_size": 48}}, {"moe_ffn_hidden_size": 48}),
    (EXPERTS, {"model": {"moe_router_topk": 3}}, {"moe_router_topk": 3}),
    (EXPERTS, {"model": {"moe_router_score_function": "sigmoid"}}, {"moe_router_score_function": "sigmoid"}),
    (EXPERTS, {"model": {"moe_router_pre_softmax": True}}, {"moe_router_pre_softmax": True}),
    (EXPERTS, {"model": {"moe_router_dtype": "fp64"}}, {"moe_router_dtype": "fp64"}),
    (EXPERTS, {"model": {"moe_router_load_balancing_type": ("seq_aux_loss",)}}, {}),
    (
        EXPERTS,
        {"model": {"moe_aux_loss_coeff": (0.125,)}},
        {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.125},
    ),
    (
        BALANCED,
        {"model": {"moe_router_load_balancing_type": ("seq_aux_loss",)}},
        {"moe_router_load_balancing_type": "seq_aux_loss"},
    ),
    (
        BALANCED,
        {"model": {"moe_router_load_balancing_type": ("sinkhorn",)}},
        {"moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0.0},
    ),
    (EXPERTS, {"model": {"moe_z_loss_coeff": 0.25}}, {"moe_z_loss_coeff": 0.25}),
    (EXPERTS, {"model": {"moe_z_loss_coeff": 0.0}}, {"moe_z_loss_coeff": 0.0}),
    (
        EXPERTS,
        {"model": {"moe_shared_expert_intermediate_size": 40}},
        {"moe_shared_expert_intermediate_size": 40},
    ),
    (EXPERTS, {"model": {"moe_grouped_gemm": True}}, {"moe_grouped_gemm": True}),
    (EXPERTS, {"layout": {"moe_token_dispatcher_type": "alltoall"}}, {"moe_token_dispatcher_type": "alltoall"}),
    (EXPERTS, {"layout": {"expert_model_parallel_size": 4}}, {"expert_model_parallel_size": 4}),
    (EXPERTS, {"layout": {"expert_tensor_parallel_size": 2}}, {"expert_tensor_parallel_size": 2}),
    (
        EXPERTS,
        {"layout": {"tensor_model_parallel_size": 4}},
        {"tensor_model_parallel_size": 4, "expert_tensor_parallel_size": 4},
    ),
    (
        _merged(EXPERTS, {"layout": {"expert_tensor_parallel_size": 2}}),
        {"layout": {"tensor_model_parallel_size": 4}},
        {"tensor_model_parallel_size": 4},
    ),
]


def test_what_a_model_is_built_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every argument, on a GPU and on a CPU; where a model is built on the meta device, that is left to the caller."""
    dense = _transformer(FUSING, monkeypatch)
    assert dense == DENSE
    on_cpu = {"use_cpu_initialization": True, "batch_p2p_comm": False}
    not_fused = {"bias_dropout_fusion": False, "bias_activation_fusion": False}
    assert _differences(_transformer(FUSING, monkeypatch, "cpu"), dense) == on_cpu | not_fused
    assert _differences(_transformer(FUSING, monkeypatch, on_meta=True), dense) == {"use_cpu_initialization": True}
    assert _differences(_transformer(EXPERTS, monkeypatch), dense) == OF_EXPERTS


@pytest.mark.parametrize(("base", "flags", "expected"), OF_THE_MODEL, ids=[_named(one[1]) for one in OF_THE_MODEL])
def test_a_flag_of_the_model_is_one_argument(
    base: Groups, flags: Groups, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = _merged(FUSING, base)
    found, before = (_transformer(given, monkeypatch) for given in (_merged(base, flags), base))
    assert _differences(found, before) == expected


OPTIMIZER: dict[str, Any] = {
    "optimizer": "adam",
    "lr": 0.25,
    "min_lr": 0.0,
    "decoupled_lr": None,
    "decoupled_min_lr": None,
    "weight_decay": 0.01,
    "fp16": False,
    "bf16": False,
    "params_dtype": torch.float32,
    "loss_scale": None,
    "initial_loss_scale": 2.0**32,
    "min_loss_scale": 1.0,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_eps": 1e-8,
    "use_distributed_optimizer": False,
    "overlap_param_gather": False,
    "clip_grad": 1.0,
    "log_num_zeros_in_grad": False,
}

OF_THE_OPTIMIZER: list[tuple[Groups, dict[str, Any]]] = [
    *(
        ({"optimizer": {name: value}}, {name: value})
        for name, value in {
            "lr": 0.5,
            "min_lr": 0.125,
            "decoupled_lr": 0.75,
            "decoupled_min_lr": 0.0625,
            "weight_decay": 0.03,
            "clip_grad": 0.0,
            "adam_beta1": 0.7,
            "adam_beta2": 0.8,
            "adam_eps": 1e-5,
        }.items()
    ),
    *(
        ({"training": {name: value}}, {name: value})
        for name, value in {
            "loss_scale": 512.0,
            "initial_loss_scale": 4096.0,
            "min_loss_scale": 16.0,
            "loss_scale_window": 77,
            "hysteresis": 5,
        }.items()
    ),
    ({"training": {"fp16": True}}, {"fp16": True, "params_dtype": torch.float16}),
    ({"training": {"bf16": True}}, {"bf16": True, "params_dtype": torch.bfloat16}),
    ({"logging": {"log_num_zeros_in_grad": True}}, {"log_num_zeros_in_grad": True}),
    ({"layout": {"overlap_param_gather": True}}, {"overlap_param_gather": True}),
    ({"layout": {"use_distributed_optimizer": True}}, {}),
    ({"optimizer": {"sgd_momentum": 0.3}}, {}),
    (
        {"optimizer": {"optimizer": "sgd", "sgd_momentum": 0.3}},
        {"optimizer": "sgd", "sgd_momentum": 0.3, "adam_beta1": ..., "adam_beta2": ..., "adam_eps": ...},
    ),
    (
        {"optimizer": {"optimizer": "lion", "lion_beta1": 0.3}},
        {"adam_beta1": ..., "adam_beta2": ..., "adam_eps": ...},  # the engine builds Adam, whose place Lion takes
    ),
]


@pytest.mark.parametrize(("flags", "expected"), OF_THE_OPTIMIZER, ids=[_named(one[0]) for one in OF_THE_OPTIMIZER])
def test_a_flag_of_the_optimizer_is_one_argument(
    flags: Groups, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_settings, "CoreOptimizerConfig", lambda **given: given)

    def settings(flags: Groups, *, distributed: bool = False) -> Any:
        return engine.optimizer_settings(_config(_merged({"optimizer": {"lr": 0.25}}, flags)), distributed=distributed)

    assert settings({}) == OPTIMIZER
    assert _differences(settings(flags), OPTIMIZER) == expected
    assert _differences(settings(flags, distributed=True), OPTIMIZER) == expected | {"use_distributed_optimizer": True}


REDUCTIONS: dict[str, Any] = {
    "grad_reduce_in_fp32": False,
    "overlap_param_gather": False,
    "use_distributed_optimizer": False,
    "num_distributed_optimizer_instances": 1,
    "bucket_size": None,
    "overlap_grad_reduce": False,
}

OF_REDUCTIONS: list[tuple[Groups, dict[str, Any], dict[str, Any]]] = [
    ({}, {}, {}),
    (
        {"training": {"accumulate_allreduce_grads_in_fp32": True}},
        {"grad_reduce_in_fp32": True},
        {"grad_reduce_in_fp32": True},
    ),
    ({"training": {"grad_reduce_in_bf16": True}}, {}, {}),
    ({"layout": {"overlap_param_gather": True}}, {"overlap_param_gather": True}, {"overlap_param_gather": True}),
    ({"layout": {"use_distributed_optimizer": True}}, {"use_distributed_optimizer": True}, {}),
    ({"layout": {"overlap_grad_reduce": True}}, {"overlap_grad_reduce": True}, {}),
    (
        {"layout": {"num_distributed_optimizer_instances": 2}},
        {"num_distributed_optimizer_instances": 2},
        {"num_distributed_optimizer_instances": 2},
    ),
    ({"layout": {"ddp_bucket_size": 12345}}, {"bucket_size": 12345}, {"bucket_size": 12345}),
    ({"layout": {"data_parallel_sharding_strategy": "optim"}}, {}, {"data_parallel_sharding_strategy": "optim"}),
    ({"layout": {"outer_dp_sharding_strategy": "optim"}}, {}, {"outer_dp_sharding_strategy": "optim"}),
    ({"training": {"bf16": True}}, {}, {"megatron_fsdp_main_params_dtype": torch.float32}),
    ({"training": {"fp16": True}}, {}, {"megatron_fsdp_main_params_dtype": torch.float32}),
]
"""Flags, and what differs with them for DDP and for megatron-core's FSDP."""


@pytest.mark.parametrize(("flags", "ddp", "fsdp"), OF_REDUCTIONS, ids=[_named(one[0]) for one in OF_REDUCTIONS])
def test_a_flag_of_the_reductions_is_one_argument(
    flags: Groups, ddp: dict[str, Any], fsdp: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "DistributedDataParallelConfig", lambda **given: given)
    given: Any = engine.ddp_config(_config(flags))
    assert _differences(given, REDUCTIONS) == ddp
    base = REDUCTIONS | {
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "use_megatron_fsdp": True,
        "data_parallel_sharding_strategy": None,
        "outer_dp_sharding_strategy": "no_shard",
        "megatron_fsdp_main_params_dtype": None,
        "megatron_fsdp_main_grads_dtype": torch.float32,
        "fsdp_all_gather_in_start_param_sync": False,
    }
    sharded: Any = MegatronFSDP(_config(flags))._settings()
    assert _differences(sharded, base) == fsdp


OF_GROUPS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"tensor_model_parallel_size": 3}, {"tensor_model_parallel_size": 3, "expert_tensor_parallel_size": 3}),
    ({"pipeline_model_parallel_size": 5}, {"pipeline_model_parallel_size": 5}),
    ({"num_virtual_stages_per_pipeline_rank": 7}, {"virtual_pipeline_model_parallel_size": 7}),
    ({"num_virtual_stages_per_pipeline_rank": 1}, {}),
    ({"expert_model_parallel_size": 11}, {"expert_model_parallel_size": 11}),
    ({"expert_tensor_parallel_size": 13}, {"expert_tensor_parallel_size": 13}),
    ({"context_parallel_size": 17}, {"context_parallel_size": 17}),
    ({"num_distributed_optimizer_instances": 19}, {"num_distributed_optimizer_instances": 19}),
    ({"use_tp_pp_dp_mapping": True}, {"order": "tp-cp-ep-pp-dp"}),
    ({"distributed_timeout_minutes": 23.0}, {"distributed_timeout_minutes": 23.0 + 5.0 / 60.0}),
]


@pytest.mark.parametrize(("flags", "expected"), OF_GROUPS, ids=[_named({"layout": one[0]}) for one in OF_GROUPS])
def test_a_flag_of_the_layout_is_one_argument(
    flags: dict[str, Any], expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(groups, "start", lambda *given, **named: started.append((given, named)))
    monkeypatch.setattr(groups.parallel_state, "initialize_model_parallel", lambda **named: given.append(named))
    monkeypatch.setattr(groups.ProcessGroupCollection, "use_mpu_process_groups", lambda: "the groups")
    monkeypatch.setattr(groups, "own_groups_only", torch.no_grad)
    here: Any = "device"
    for from_host, layout in ((False, LayoutConfig(world_size=1)), (True, LayoutConfig(world_size=1, **flags))):
        assert groups.initialize(layout, here, from_host=from_host) == "the groups"
        assert started[-1] == ((layout, "device"), {"from_host": from_host})
    assert given[0] == {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "context_parallel_size": 1,
        "num_distributed_optimizer_instances": 1,
        "order": "tp-cp-ep-dp-pp",
        "distributed_timeout_minutes": 10.0 + 5.0 / 60.0,
        "create_gloo_process_groups": False,
    }
    assert _differences(given[1], given[0]) == expected
