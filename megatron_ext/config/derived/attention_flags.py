"""Says where `--attention-backend` and `--flash-attention-version` choose the attention kernel.

They choose among torch's kernels over whole sequences. Documents, and parts of sequences, have kernels that are called
by name; Transformer Engine chooses among its own, to which both flags are handed.
"""

from collections.abc import Mapping
from typing import Any

from megatron_ext.config.schema import Config

LATENT_FLAGS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "latent_norm_epsilon",
)
"""Fields that say more of --multi-latent-attention."""

STRETCH_FLAGS = (
    *(
        "rotary_scaling_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
    ),
    *("no_yarn_correction_range_round_to_int", "rotary_attention_factor"),
    *("longrope_short_factor", "longrope_long_factor"),
)
"""Fields that configure --rope-type further."""

FLAGS = ("attention_backend", "flash_attention_version")
"""Fields of the flags."""


def kernels_by_name(config: Config) -> str | None:
    """Return why our attention calls its kernels by name in every layer; None where some layer's has a choice."""
    if config.data.reset_attention_mask:
        return "with --reset-attention-mask attention is computed by torch's kernel for documents"
    if all(config.layout.attends_in_parts):
        return "with --context-parallel-size FlashAttention attends to parts of a sequence"
    model = config.model
    if model.attention_logit_softcapping is not None or model.position_embedding_type == "alibi":
        return "with capped scores or ALiBi attention is computed by torch's flex_attention"
    if "vanilla" not in model.softmax_types:
        return f"with --softmax-type {model.softmax_type} attention is computed by torch's flex_attention"
    return None


def chooses_nothing(config: Config, backend: str) -> str | None:
    """Return why --attention-backend `backend`, with its version, changes nothing; None where it chooses."""
    if config.model.transformer_impl == "transformer_engine":
        return None
    if config.layout.device == "cpu" and backend != "unfused":
        return "with --device cpu torch has one fused kernel of attention"
    return kernels_by_name(config)


def asked_for(values: Mapping[str, Any]) -> list[str]:
    """Return which of the flags ask for a kernel; `values` are theirs by field name, others may be among them."""
    return [name for name in FLAGS if values.get(name) not in (None, "auto", "local")]
