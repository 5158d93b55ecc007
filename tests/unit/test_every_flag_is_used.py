"""A flag that is accepted and does nothing is a defect: every field of the schema is read somewhere."""

import dataclasses
import re
from pathlib import Path

import pytest

from megatron_ext.config.optimizers import OPTIMIZERS
from megatron_ext.config.schema import Config

PACKAGE = Path(__file__).resolve().parents[2] / "megatron_ext"
# Checking a value, or showing it, is not using it.
NOT_USES = ("config/schema/", "rules/", "plan/dry_run.py", "config/help_text.py", "config/reference.py")
# Used by what they stand for rather than by name.
BY_CONSTRUCTION = {
    "exit_signal_handler": "SIGTERM always saves and stops; the help says that the flag changes nothing",
    "ckpt_format": "one format, and the flag's only choice",
    "non_persistent_ckpt_type": "one kind, and the flag's only choice: the rules ask for it",
    "use_checkpoint_args": "config/saved.py reads it among the typed values, before there is a configuration",
    "test_data_path": "data/corpus.py reads `{split}_data_path`",
    "train_data_path": "data/corpus.py reads `{split}_data_path`",
    "valid_data_path": "data/corpus.py reads `{split}_data_path`",
    "num_layers_per_virtual_pipeline_stage": "resolve turns it into num_virtual_stages_per_pipeline_rank",
    "microbatch_group_size_per_virtual_pipeline_stage": "read through microbatch_group_size",
    "num_virtual_stages_per_pipeline_rank": "read through virtual_pipeline_model_parallel_size",
    "group_query_attention": "read through num_key_value_heads",
    "num_query_groups": "read through num_key_value_heads",
    "expert_tensor_parallel_size": "read through expert_tensor_size",
    "moe_ffn_hidden_size": "read through expert_ffn_hidden_size",
    "moe_router_load_balancing_type": "read through load_balancing_coefficient",
    "moe_aux_loss_coeff": "read through load_balancing_coefficient",
    "grad_reduce_in_bf16": "resolve leaves accumulate_allreduce_grads_in_fp32 off",
    "main_grads_dtype": "resolve turns it into grad_reduce_in_bf16",
    "make_vocab_size_divisible_by": "resolve turns it into padded_vocab_size",
    "lr_scale_base_batch_size": "config/lr_scale.py reads it among the typed values, and the rates are scaled",
    "recompute_activations": "resolve turns it into recompute_granularity",
    # tests/unit/test_optimizers.py shows that each arrives at its torch optimizer.
    **{name: f"{traits.title} reads it" for traits in OPTIMIZERS.values() for name in traits.flags},
}
FIELDS = [field.name for group in dataclasses.fields(Config) for field in dataclasses.fields(group.type)]  # pyright: ignore[reportArgumentType]
SOURCE = "\n".join(
    path.read_text() for path in PACKAGE.rglob("*.py") if not any(part in path.as_posix() for part in NOT_USES)
)


@pytest.mark.parametrize("name", sorted(set(FIELDS) - set(BY_CONSTRUCTION)))
def test_the_field_is_read(name: str) -> None:
    assert re.search(rf"\.{name}\b", SOURCE), f"--{name.replace('_', '-')} is accepted and does nothing"


def test_the_exceptions_are_fields() -> None:
    assert set(BY_CONSTRUCTION) <= set(FIELDS)
