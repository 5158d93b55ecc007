"""Values of flags arrive in the settings of megatron-core that they are for, each by one that is no default."""

from types import SimpleNamespace
from typing import Any

from megatron_ext.model.config import transformer_config
from megatron_ext.optim.settings import optimizer_config, set_rates
from megatron_ext.sharding.engine import ddp_config
from tests.support.small_models import LLAMA, small_config


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


def test_what_changes_no_result_arrives() -> None:
    """What changes one is changed in a real run by tests/distributed/test_every_field.py."""
    layout = {
        **{"world_size": 16, "tensor_model_parallel_size": 2, "sequence_parallel": True},
        **{"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2},
        "microbatch_group_size_per_virtual_pipeline_stage": 4,
        **{"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
        **{"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 12345},
    }
    training = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3}
    for wide in (False, True):
        of_experts = {"num_experts": 8, "moe_ffn_hidden_size": 48, "moe_grouped_gemm": wide}
        config = small_config({**LLAMA, **of_experts}, layout, {**training, "accumulate_allreduce_grads_in_fp32": wide})
        reductions, model = ddp_config(config), transformer_config(config, "cpu")
        names = ("use_distributed_optimizer", "num_distributed_optimizer_instances", "overlap_grad_reduce")
        names = (*names, "overlap_param_gather")
        assert [getattr(reductions, name) for name in names] == [layout[name] for name in names]
        assert (reductions.grad_reduce_in_fp32, reductions.bucket_size) == (wide, 12345)
        assert not ddp_config(config, overlap_grad_reduce=False).overlap_grad_reduce
        assert {name: getattr(model, name) for name in training} == training
        assert model.moe_grouped_gemm == wide
        assert (model.microbatch_group_size_per_vp_stage, model.virtual_pipeline_model_parallel_size) == (4, 2)
        assert model.calculate_per_token_loss
        for gathers in (False, True):
            assert optimizer_config(config, distributed=True, overlaps=gathers).overlap_param_gather == gathers
            assert optimizer_config(config, distributed=gathers, overlaps=True).use_distributed_optimizer == gathers
