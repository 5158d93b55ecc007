"""Flags that DeepSpeed's programs save: those of the model as ours, and what is not computed here by its name."""

from typing import Any

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate.deepspeed_checkpoint.saved_flags import flags_of

MEGATRON = {"num_layers": 2, "hidden_size": 24, "num_attention_heads": 4, "seq_length": 32}
NEOX = {**MEGATRON, "pos_emb": "rotary"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ({**MEGATRON, "position_embedding_type": 3}, {"position_embedding_type": "alibi"}),
        (MEGATRON, {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm"}),
        ({**MEGATRON, "use_rotary_position_embeddings": True, "rope_theta": 500}, {"rotary_base": 500.0}),
        ({**MEGATRON, "bias_gelu_fusion": True}, {"openai_gelu": True}),
        ({**MEGATRON, "bias_gelu_fusion": True, "swiglu": True}, {"swiglu": True, "openai_gelu": False}),
        ({**MEGATRON, "num_key_value_heads": 2}, {"group_query_attention": True, "num_query_groups": 2}),
        (
            {**MEGATRON, "lr": 0.5, "adam_beta2": 0.95, "clip_grad": 2.0},
            {"lr": 0.5, "adam_beta2": 0.95, "clip_grad": 2.0},
        ),
        (NEOX, {"position_embedding_type": "rope", "ffn_hidden_size": 96, "norm_epsilon": 1e-5}),
        ({**NEOX, "norm": "rmsnorm"}, {"normalization": "RMSNorm", "norm_epsilon": 1e-8}),
        ({**NEOX, "num_kv_heads": 2}, {"group_query_attention": True, "num_query_groups": 2}),
        ({**NEOX, "activation": "geglu", "bias_gelu_fusion": True}, {"geglu": True, "openai_gelu": False}),
        (
            {**MEGATRON, "num_experts": [8], "expert_interval": 2},
            {"num_experts": 8, "moe_layer_freq": "([0]*1+[1])*1+[0]*0"},
        ),
        ({**NEOX, "gpt_j_residual": True}, {"parallel_residual": "two-norms"}),
        (
            {**NEOX, "pos_emb": "learned"},
            {"position_embedding_type": "learned_absolute", "max_position_embeddings": 32},
        ),
    ],
)
def test_flags_become_ours(args: dict[str, Any], expected: dict[str, Any]) -> None:
    found = flags_of(args)
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({**MEGATRON, "num_experts": [4], "mlp_type": "residual"}, "--mlp-type residual"),
        ({**MEGATRON, "glu_activation": "reglu"}, "glu_activation reglu"),
        ({**MEGATRON, "apply_layernorm_1p": True}, "apply_layernorm_1p"),
        ({**NEOX, "pos_emb": "rpe"}, "pos_emb rpe"),
        ({**NEOX, "activation": "relu"}, "activation relu"),
        ({**NEOX, "gpt_j_tied": True}, "gpt_j_tied True"),
        ({**NEOX, "attention_config": [[["global", "local"], 1]]}, "attention_config local"),
        ({**NEOX, "output_layer_parallelism": "row", "no_weight_tying": True}, "output_layer_parallelism row"),
        ({**NEOX, "use_bias_in_mlp": False}, "of which one is false"),
    ],
)
def test_what_is_not_computed_here_is_named(args: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=f"its model cannot be computed here: .*{said}"):
        flags_of(args)
