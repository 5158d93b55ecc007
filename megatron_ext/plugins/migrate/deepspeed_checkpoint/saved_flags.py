"""Turns the flags that Megatron-DeepSpeed and GPT-NeoX save with a checkpoint into ours.

Megatron-DeepSpeed (and BigScience's, from which BLOOM came) saves its argparse.Namespace, GPT-NeoX the dictionary of
its configuration. What either can say of the model and is not computed here is refused by its name.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from megatron_ext.config.parse.arguments import Typed
from megatron_ext.config.parse.options import names_by_resume, options_by_name, read_yaml_value
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.migrate.megatron_deepspeed import read
from megatron_ext.plugins.migrate.megatron_lm_checkpoint.saved_flags import saved_model

_NORMS = {"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "LayerNorm": "LayerNorm", "RMSNorm": "RMSNorm"}
_POSITIONS = {1: "rope", 2: "learned_absolute", 3: "alibi"}
"""BigScience's enumeration."""
_KEPT_CURVES = (
    *("adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "train_iters", "train_samples", "seed"),
    *("micro_batch_size", "global_batch_size", "hidden_dropout", "attention_dropout", "init_method_std"),
)


def flags_of(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the flags of the model and of the curves of its training.

    Raises:
        ConfigurationError: the model has something that is not computed here; all of it is named.
    """
    refused = [*(_refused_by_neox if is_neox(args) else _refused_by_megatron)(args)]
    if refused:
        raise ConfigurationError(f"its model cannot be computed here: {'; '.join(refused)}")
    values = _of_neox(args) if is_neox(args) else _of_megatron(args)
    for name in (*names_by_resume("curve"), *_KEPT_CURVES):
        with suppress(ValueError):  # None, or another kind of value under the same name
            values.setdefault(name, read_yaml_value(options_by_name()[name], args.get(name)))
    return values


def is_neox(args: Mapping[str, Any]) -> bool:
    """Return whether GPT-NeoX saved these flags."""
    return "pos_emb" in args


def has_gate_last(args: Mapping[str, Any]) -> bool:
    """Return whether the second half of the rows of an MLP's first matrix goes through the activation, and not the
    first one."""
    return (args.get("activation") if is_neox(args) else args.get("glu_activation")) in _GATED


_GATED = ("swiglu", "geglu")


def _experts(args: Mapping[str, Any]) -> Typed:
    """Return the flags of the experts of a Megatron-DeepSpeed's model, as a script says them."""
    experts = args.get("num_experts")
    words = ["--no-pipeline-parallel", "--num-layers", str(args.get("num_layers")), "--num-experts"]
    words += map(str, experts if isinstance(experts, list) else [experts or 1])
    names = ("topk", "expert_interval", "mlp_type", "moe_loss_coeff", "moe_train_capacity_factor")
    words += [f"--{name.replace('_', '-')}={args[name]}" for name in names if args.get(name) is not None]
    return read([*words, *([] if args.get("moe_token_dropping", True) else ["--disable-moe-token-dropping"])])


def _refused_by_megatron(args: Mapping[str, Any]) -> Iterator[str]:
    yield from _experts(args).problems
    if args.get("glu_activation") not in (None, *_GATED):
        yield f"glu_activation {args['glu_activation']}"
    reasons = {
        "apply_layernorm_1p": "whose weights are kept less one",
        "apply_residual_connection_post_layernorm": "whose residual stream is normalized",
    }
    yield from (f"{name}, {reason}" for name, reason in reasons.items() if args.get(name))


def _of_megatron(args: Mapping[str, Any]) -> dict[str, Any]:
    kind: Any = args.get("position_embedding_type")
    heads = args.get("num_attention_heads")
    groups = args.get("num_key_value_heads") or heads
    fused = args.get("bias_gelu_fusion", False) and not (args.get("swiglu") or args.get("squared_relu"))
    known = {
        **args,
        "position_embedding_type": "rope"
        if args.get("use_rotary_position_embeddings")
        else _POSITIONS.get(kind, kind or "learned_absolute"),
        "normalization": _NORMS.get(str(args.get("normalization")), "LayerNorm"),
        "add_bias_linear": args.get("add_bias_linear", True),
        "rotary_base": args.get("rope_theta"),
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "openai_gelu": bool(args.get("openai_gelu") or fused),  # the fused form is the one by tanh
        "num_experts": None,
        **{gated: True for gated in _GATED if args.get("glu_activation") == gated},
    }
    return {**saved_model(known), "seq_length": args.get("seq_length"), **_experts(args).values}


def _refused_by_neox(args: Mapping[str, Any]) -> Iterator[str]:
    kinds = {str(kind) for kind in _leaves(args.get("attention_config") or [])}
    usual: dict[str, tuple[Any, ...]] = {
        "pos_emb": ("rotary", "learned", "alibi", "none"),
        "norm": (None, "layernorm", "rmsnorm"),
        "activation": (None, "gelu", *_GATED),
        "gpt_j_tied": (None, False),
        "use_qk_layernorm": (None, False),
        "use_mup": (None, False),
        "moe_num_experts": (None, 0, 1),
        "sliding_window_width": (None,),
    }
    for name, values in usual.items():
        if args.get(name) not in values:
            yield f"{name} {args.get(name)}"
    others = sorted(kind for kind in kinds if kind not in ("global", "flash") and not kind.isdecimal())
    if others:
        yield f"attention_config {', '.join(others)}"
    if args.get("output_layer_parallelism") == "row" and args.get("no_weight_tying"):
        yield "output_layer_parallelism row, whose output layer is divided by channels"
    biases = {args.get(f"use_bias_in_{where}", True) for where in ("attn_linear", "mlp")}
    if len(biases) > 1:
        yield "use_bias_in_attn_linear and use_bias_in_mlp, of which one is false"


def _leaves(value: Any) -> Iterator[Any]:
    for one in value if isinstance(value, list | tuple) else ():
        yield from _leaves(one) if isinstance(one, list | tuple) else [one]


def _of_neox(args: Mapping[str, Any]) -> dict[str, Any]:
    positions = {"rotary": "rope", "learned": "learned_absolute"}
    is_rms, hidden = args.get("norm") == "rmsnorm", args.get("hidden_size")
    heads, groups = args.get("num_attention_heads"), args.get("num_kv_heads")
    gated = has_gate_last(args)
    grouped = {"group_query_attention": True, "num_query_groups": groups} if groups not in (None, heads) else {}
    values = {
        **{name: args.get(name) for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length")},
        "max_position_embeddings": args.get("max_position_embeddings") or args.get("seq_length"),
        "ffn_hidden_size": args.get("intermediate_size") or (hidden and 4 * hidden),  # rounded, by its version
        "position_embedding_type": positions.get(str(args["pos_emb"]), args["pos_emb"]),
        "rotary_percent": float(args.get("rotary_pct") or 1.0),
        "rotary_base": float(args.get("rotary_emb_base") or 10000),
        "untie_embeddings_and_output_weights": bool(args.get("no_weight_tying")),
        "normalization": "RMSNorm" if is_rms else "LayerNorm",
        "norm_epsilon": args.get("rms_norm_epsilon", 1e-8) if is_rms else args.get("layernorm_epsilon", 1e-5),
        "parallel_residual": "two-norms" if args.get("gpt_j_residual") else "none",
        "disable_bias_linear": not args.get("use_bias_in_mlp", True),
        "openai_gelu": bool(args.get("bias_gelu_fusion")) and not gated,
        **grouped,
        **({str(args["activation"]): True} if gated else {}),
    }
    return {name: value for name, value in values.items() if value is not None}
