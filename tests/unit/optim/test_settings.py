"""Values of flags arrive in the settings of megatron-core that they are for, each by one that is no default."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.model.config import transformer_config
from megatron_ext.optim.settings import optimizer_config, set_rates
from megatron_ext.sharding.engine import ddp_config
from tests.support.small_models import LLAMA, small_config

SCALES = {"initial_loss_scale": 4096.0, "min_loss_scale": 16.0, "loss_scale_window": 77, "hysteresis": 5}


@pytest.mark.parametrize(
    "training",
    [
        {"fp16": True, **SCALES},
        {"fp16": True, "loss_scale": 512.0},
        {"bf16": True},
    ],
)
def test_the_optimizers_settings(training: dict[str, Any]) -> None:
    config = small_config(training=training, layout={"overlap_param_gather": True})
    logging = type(config.logging)(log_num_zeros_in_grad=True)
    own: dict[str, Any] = {
        "lr": 0.25,
        "min_lr": 0.125,
        "decoupled_lr": 0.5,
        "decoupled_min_lr": 0.0625,
        "weight_decay": 0.03,
    }
    adam: dict[str, Any] = {"adam_beta1": 0.7, "adam_beta2": 0.8, "adam_eps": 1e-5}
    optimizer = OptimizerConfig(**own, **adam, clip_grad=0.75)
    config = type(config)(config.model, config.layout, config.training, optimizer, config.data, logging=logging)
    for distributed in (False, True):
        settings = optimizer_config(config, distributed=distributed, overlaps=True)
        assert settings.use_distributed_optimizer == distributed
        expected = {**own, **adam, **training, "clip_grad": 0.75, "log_num_zeros_in_grad": True}
        expected |= {
            "overlap_param_gather": True,
            "params_dtype": torch.float16 if "fp16" in training else torch.bfloat16,
        }
        assert {name: getattr(settings, name) for name in expected} == expected
    assert not optimizer_config(config, distributed=False, overlaps=False).overlap_param_gather


def test_a_groups_own_factor_and_rate() -> None:
    """A decoupled rate is for the groups that the engine has made for embeddings and the output layer."""
    usual = {"is_decoupled_lr": False, "wd_mult": 1.0, "lr_mult": 1.0}
    norms = {"is_decoupled_lr": False, "wd_mult": 0.0, "lr_mult": 1.0}
    ends = {"is_decoupled_lr": True, "wd_mult": 1.0, "lr_mult": 1.0}
    slow = {"is_decoupled_lr": False, "wd_mult": 2.0, "lr_mult": 0.25}
    optimizer: Any = SimpleNamespace(param_groups=[usual, norms, ends, slow])
    set_rates(optimizer, 0.5, 0.25, 0.125)
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (0.5, 0.25),
        (0.5, 0.0),
        (0.125, 0.25),
        (0.125, 0.5),
    ]
    set_rates(optimizer, 0.5, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5, 0.5, 0.125]


def test_the_reductions_settings() -> None:
    layout = {
        "world_size": 4,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "num_distributed_optimizer_instances": 2,
        "ddp_bucket_size": 12345,
    }
    for wide in (False, True):
        config = small_config(layout=layout, training={"accumulate_allreduce_grads_in_fp32": wide})
        settings = ddp_config(config)
        assert settings.grad_reduce_in_fp32 == wide
        assert settings.bucket_size == 12345
        names = [name for name in layout if name not in ("world_size", "ddp_bucket_size")]
        assert [getattr(settings, name) for name in names] == [layout[name] for name in names]
        assert not ddp_config(config, overlap_grad_reduce=False).overlap_grad_reduce


def test_the_models_settings() -> None:
    experts = {
        "num_experts": 8,
        "moe_ffn_hidden_size": 48,
        "moe_router_topk": 3,
        "moe_router_score_function": "sigmoid",
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp64",
        "moe_aux_loss_coeff": (0.125,),
        "moe_z_loss_coeff": 0.25,
        "moe_shared_expert_intermediate_size": 40,
        "moe_grouped_gemm": True,
    }
    model = {**LLAMA, "hidden_dropout": 0.25, "attention_dropout": 0.5, "norm_epsilon": 3e-4, "init_method_std": 0.75}
    training = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
    layout = {
        "world_size": 16,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "context_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "num_virtual_stages_per_pipeline_rank": 2,
        "microbatch_group_size_per_virtual_pipeline_stage": 4,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall",
        "cp_comm_type": ("a2a",),
    }
    config = small_config({**model, **experts}, layout, training)
    found = transformer_config(config, "cpu")
    same = (*experts.keys() - {"num_experts"}, "hidden_dropout", "attention_dropout", "init_method_std", *training)
    same = (*same, *layout.keys() - {"world_size", "num_virtual_stages_per_pipeline_rank", "cp_comm_type"})
    same = tuple(name for name in same if name != "microbatch_group_size_per_virtual_pipeline_stage")
    given = {**model, **experts, **training, **layout, "moe_aux_loss_coeff": [0.125]}
    assert {name: getattr(found, name) for name in same} == {name: given[name] for name in same}
    assert (found.num_moe_experts, found.layernorm_epsilon, found.cp_comm_type) == (8, 3e-4, "a2a")
    assert (found.microbatch_group_size_per_vp_stage, found.virtual_pipeline_model_parallel_size) == (4, 2)
    assert found.calculate_per_token_loss
