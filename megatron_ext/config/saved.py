"""The configuration that a checkpoint was saved with, beside the one that is given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.files import ExcessiveFile, read_yaml
from megatron_ext.config.options import options_by_name, read_yaml_value
from megatron_ext.errors import ConfigurationError

MODEL_SHAPES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "group_query_attention",
    "num_query_groups",
    "position_embedding_type",
    "swiglu",
    "normalization",
    "untie_embeddings_and_output_weights",
    "disable_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "vocab_size",
    "num_experts",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
)
"""What the weights depend on: another value cannot load them."""

MODEL_FUNCTION = (
    "rotary_base",
    "rotary_percent",
    "use_rope_scaling",
    "rope_scaling_factor",
    "rope_scaling_low_freq_factor",
    "rope_scaling_high_freq_factor",
    "rope_scaling_original_max_position_embeddings",
    "squared_relu",
    "openai_gelu",
    "norm_epsilon",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_dtype",
)
"""What the model computes from them: another value is another model, which only --finetune may want."""

# Not the length of the sequences, dropout, or the padding, which follows the layout: they may change on resuming.

TOKENIZER = (
    "tokenizer_type",
    "tokenizer_model",
    "vocab_file",
    "merge_file",
    "tokenizer_special_tokens",
    "tiktoken_pattern",
    "tiktoken_num_special_tokens",
)
"""What --use-checkpoint-args takes with the model, where no tokenizer is named."""

CURVES = (
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iters",
    "lr_decay_samples",
    "lr_warmup_iters",
    "lr_warmup_samples",
    "lr_warmup_fraction",
    "lr_warmup_init",
    "lr_wsd_decay_style",
    "lr_wsd_decay_iters",
    "lr_wsd_decay_samples",
    "weight_decay",
    "start_weight_decay",
    "end_weight_decay",
    "weight_decay_incr_style",
)
"""What the learning rate and the weight decay follow."""

LR_SCALE = ("lr_scale_rule", "lr_scale_base_batch_size")
"""Done with in a checkpoint, whose rates are the scaled ones."""


def model_names(saved: Mapping[str, Any], *, finetune: bool) -> tuple[str, ...]:
    """The fields in which a run must agree with the checkpoint that it loads."""
    names = MODEL_SHAPES if finetune else (*MODEL_SHAPES, *MODEL_FUNCTION)
    learned = saved.get("position_embedding_type", "learned_absolute") == "learned_absolute"
    return (*names, "max_position_embeddings") if learned else names


def read_saved(path: Path) -> dict[str, Any] | None:
    """The values of a checkpoint's config.yaml; None where it cannot be read, which loading will find out.

    Names that are unknown here, as of another version, are left out.

    Raises:
        ConfigurationError: it is larger or deeper than any configuration.
    """
    try:
        content = read_yaml(str(path), "the checkpoint's")
        known = {name: options_by_name()[name] for name in content if name in options_by_name()}
        return {name: read_yaml_value(option, content[name]) for name, option in known.items()}
    except ExcessiveFile:
        raise
    except (ConfigurationError, ValueError):
        return None


def adopt(values: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The typed values with those of the checkpoint that --use-checkpoint-args and its like ask for.

    A flag of the model that was typed stays, so that a rule can name it where the checkpoint has another value.
    """
    adopted = dict(values)
    if values.get("use_checkpoint_args"):
        names = model_names(saved, finetune=False)
        names += TOKENIZER if "tokenizer_type" not in values else ()
        adopted = {name: saved[name] for name in names if name in saved} | adopted
    if values.get("use_checkpoint_opt_param_scheduler"):
        adopted = {name: value for name, value in adopted.items() if name not in (*CURVES, *LR_SCALE)}
        adopted |= {name: saved[name] for name in CURVES if name in saved}
        unit = "samples" if "train_samples" in saved else "iters"
        adopted.setdefault(f"lr_decay_{unit}", saved.get(f"train_{unit}"))
    return adopted
