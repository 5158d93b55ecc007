"""Each field of the schema says what a resume does with it, and a resume does that."""

import shlex
import typing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.derived.attention_flags import LATENT_FLAGS, STRETCH_FLAGS
from megatron_ext.config.parse.arguments import parse
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.config.parse.options import Option, names_by_resume, options, options_by_name
from megatron_ext.config.parse.saved import adopt, read_saved, shapes_and_function
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config, model_flags
from megatron_ext.config.schema.option import Resume, option
from megatron_ext.rules.validate import problems
from tests.support.wrong_flags import BASE

EVERY_PART = (
    f"{BASE} --disable-bias-linear --group-query-attention --num-query-groups 4 --num-experts 4 "
    "--moe-ffn-hidden-size 64 --moe-shared-expert-intermediate-size 64 --moe-router-dtype fp32 --window-size 3,0 "
    "--window-attn-skip-freq 2 --attention-dropout 0 --moe-layer-freq 2 --softmax-scale 0.3 "
    "--attention-logit-softcapping 2 --final-logit-softcapping 3 --qkv-clip 4 --moe-shared-expert-gate "
    "--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 --moe-router-group-scores 1 "
    "--num-query-groups-local 2 --softmax-type-local learnable --value-channels 4 --value-multiplier 2 "
    "--moe-router-topk-scaling-factor 2.5 --attention-chunk-size 512 --moe-latent-size 32"
)
ROTATED = f"{EVERY_PART} --position-embedding-type rope --no-rope-freq 2 --mtp-num-layers 1"
"""The same with what learned positions do not have."""
SCALED = f"{ROTATED} --rope-type yarn --rotary-base-local 9 --attention-temperature-scale 0.1"
LONG = f"{ROTATED} --kv-channels 4 --rope-type longrope --longrope-short-factor 1 2 --longrope-long-factor 3 4"
LATENT = f"{BASE} --position-embedding-type rope --multi-latent-attention --q-lora-rank 4 --qk-layernorm"
LATENT += " --latent-norm-epsilon 1e-3"
INDEXED = (
    f"{LATENT} --disable-bias-linear --attention-dropout 0 --experimental-attention-variant dsa "
    "--dsa-indexer-n-heads 2 --dsa-indexer-head-dim 64 --dsa-indexer-topk 4 --dsa-indexer-k-norm-epsilon 1e-4"
)
DELTA = (
    f"{BASE} --normalization RMSNorm --disable-bias-linear --experimental-attention-variant gated_delta_net "
    "--linear-attention-freq 2"
)
HYBRID = f"{BASE} --disable-bias-linear --hybrid-layer-pattern M-M*M-M* --mamba-num-groups 2"
SCANS = (
    f"{BASE} --disable-bias-linear --hybrid-layer-pattern S-S*S-S* --scan-norm with-weights --scan-norm-epsilon 1e-3"
)
SPARSE = f"{BASE} --disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-router-sparsemixer-eps 0.1"
MUP = f"{BASE} --use-mup --mup-base-hidden-size 16 --mup-base-head-dim 4 --mup-base-num-layers 2"
FREE_IN_THE_MODEL = {
    "seq_length": "a longer context goes on from a shorter one",
    "no_position_embedding": "an old spelling, which changes nothing where it is taken",
    "moe_router_load_balancing_type": "a term of the loss, not of the output",
    "moe_aux_loss_coeff": "a term of the loss, not of the output",
    "moe_z_loss_coeff": "a term of the loss, not of the output",
    "z_loss_strength": "a term of the loss, not of the output",
    "dsa_indexer_loss_coeff": "a term of the loss, not of the output",
    "dsa_indexer_use_sparse_loss": "a term of the loss, not of the output",
    "dsa_indexer_warmup": "a stage of training, after which keys are chosen",
    "mtp_loss_scaling_factor": "a term of the loss, not of the output",
    "moe_router_bias_update_rate": "how the bias goes on",
    "moe_input_jitter_eps": "regularization",
    "moe_expert_capacity_factor": "it holds in training alone",
    "moe_token_drop_policy": "it holds in training alone",
    "moe_router_force_load_balancing": "for benchmarks",
    "moe_grouped_gemm": "the same products, computed together",
    "init_method_std": "the weights have begun",
    "embedding_init_method_std": "the weights have begun",
    "init_method_xavier_uniform": "the weights have begun",
    "attention_dropout": "regularization",
    "hidden_dropout": "regularization",
    "make_vocab_size_divisible_by": "the padding follows the layout",
    "transformer_impl": "the same function, computed by others",
    "external_kernels": "the same optimizer, computed by others",
    "recurrence_kernels": "the same function, computed by others",
    "padded_vocab_size": "the padding follows the layout",
}


def config_of(flags: str) -> Config:
    return resolve(parse(shlex.split(flags)).values, Facts())


def config_with(name: str) -> Config:
    """Return a configuration in which a field says something."""
    flags = {"no_rope_freq": ROTATED, "activation_func_clamp_value": f"{EVERY_PART} --quick-geglu"}
    flags["mtp_num_layers"] = ROTATED
    flags |= dict.fromkeys(LATENT_FLAGS, LATENT) | dict.fromkeys(STRETCH_FLAGS, f"{SCALED} --rotary-attention-factor 2")
    flags |= dict.fromkeys(("rope_type", "rotary_base_local", "attention_temperature_scale"), SCALED)
    flags |= dict.fromkeys(("longrope_short_factor", "longrope_long_factor"), LONG)
    flags |= dict.fromkeys(("mup_base_hidden_size", "mup_base_head_dim", "mup_base_num_layers"), MUP)
    flags |= dict.fromkeys(("experimental_attention_variant", "linear_attention_freq"), DELTA)
    flags |= dict.fromkeys((name for name in shapes_and_function() if name.startswith("dsa_indexer")), INDEXED)
    flags |= dict.fromkeys(("hybrid_layer_pattern", "mamba_num_heads"), HYBRID)
    flags |= dict.fromkeys((name for name in shapes_and_function() if name.startswith("scan_")), SCANS)
    in_depths = HYBRID.replace("M-M*M-M*", "M-M*M-M*/-")
    flags["mtp_hybrid_override_pattern"] = f"{in_depths} --position-embedding-type rope"
    flags |= {"mamba_multipliers": f"{HYBRID} --mamba-multipliers 1 1 2 1 1"}
    flags["full_attn_idxs"] = f"{BASE} --full-attn-idxs 1"
    flags |= {"mixer_multipliers": f"{HYBRID.replace('M-M*', 'B-B-')} --mixer-multipliers 1 2"}
    flags |= {"mlp_multipliers": f"{HYBRID} --swiglu --mlp-multipliers 1 2"}
    flags["latent_norm_epsilon"] = LATENT
    flags["linear_norm_epsilon"] = f"{DELTA} --linear-norm-epsilon 1e-3"
    flags["moe_router_sparsemixer_eps"] = SPARSE
    flags["activation_func_clamp_value"] += " --activation-func-clamp-value 3"
    return config_of(flags.get(name, EVERY_PART))


def saved_by(config: Config, folder: Path) -> dict[str, Any]:
    """The values of the checkpoint that a run with this configuration writes."""
    (folder / "config.yaml").write_text(to_yaml(config))
    saved = read_saved(folder / "config.yaml")
    assert saved is not None
    return saved


def another(option: Option, value: Any) -> Any:
    if option.is_switch:
        return not value
    if option.name in TEXTS:
        return TEXTS[option.name]
    if option.choices:
        return next(choice for choice in option.choices if choice != value)
    if isinstance(value, tuple | list):
        return [2 * one for one in value]
    return value * 2 if isinstance(value, float) else value + 1


TEXTS = {
    "mscale_all_dim": 1.0,
    "glu_linear_offset": 1.0,
    "window_size": "7,0",
    "window_attn_skip_freq": "3",
    "no_rope_freq": "3",
    "moe_layer_freq": "3",
    "linear_attention_freq": "3",
    "hybrid_layer_pattern": "M-M-M-M*",
    "mtp_hybrid_override_pattern": "*-",
    "experimental_attention_variant": "kimi_delta",
}
"""Other values of fields that are texts with a meaning, or 0."""


def test_each_field_has_one_of_the_roles():
    assert {option.resume for option in options()} == set(typing.get_args(Resume))


def test_a_field_without_a_role_cannot_be_declared():
    with pytest.raises(TypeError, match="resume"):
        option(False, "A part of the model.")  # pyright: ignore[reportCallIssue]
    assert not hasattr(model_flags, "free"), "a field of the model names its role in full"


def test_a_field_of_the_model_that_may_change_has_a_reason():
    free = {option.name for option in options() if option.group == "model" and option.resume == "free"}
    assert free == set(FREE_IN_THE_MODEL), "a field that changes what the model computes is resume='function'"


@pytest.mark.parametrize("name", shapes_and_function())
def test_a_resume_with_another_model_is_refused(name: str, tmp_path: Path):
    config = config_with(name)
    saved = saved_by(config, tmp_path)
    assert problems(config, Facts(saved=saved)) == []
    was = saved[name] = another(options_by_name()[name], saved[name])
    [problem] = problems(config, Facts(saved=saved))
    assert problem.startswith(f"{options_by_name()[name].flag} ")
    assert "the checkpoint in --load was saved with" in problem
    assert isinstance(was, bool) or problem.endswith(f"use {options_by_name()[name].flag} {was}")


@pytest.mark.parametrize("name", shapes_and_function())
def test_finetuning_may_change_what_is_computed_and_not_the_shapes(name: str, tmp_path: Path):
    config = config_with(name)
    config = replace(config, checkpoint=replace(config.checkpoint, finetune=True))
    saved = saved_by(config, tmp_path)
    saved[name] = another(options_by_name()[name], saved[name])
    assert len(problems(config, Facts(saved=saved))) == (name in names_by_resume("shape"))


def test_a_function_that_the_checkpoint_was_saved_without(tmp_path: Path):
    config = config_of(EVERY_PART)
    saved = saved_by(replace(config, model=replace(config.model, moe_router_dtype=None)), tmp_path)
    assert problems(config, Facts(saved=saved)) == [
        "--moe-router-dtype fp32, but the checkpoint in --load was saved without it; leave --moe-router-dtype out"
    ]


@pytest.mark.parametrize("name", FREE_IN_THE_MODEL)
def test_what_is_free_may_change(name: str, tmp_path: Path):
    config = config_of(EVERY_PART)
    saved = {**saved_by(config, tmp_path), name: "another"}
    assert problems(config, Facts(saved=saved)) == []


def test_the_checkpoints_model_tokenizer_and_curves_are_those_of_the_roles():
    saved = {option.name: f"saved {option.name}" for option in options()}
    args, curves = {"use_checkpoint_args": True}, {"use_checkpoint_opt_param_scheduler": True}
    model_and_tokenizer = {*shapes_and_function(), *names_by_resume("tokenizer")} - {"max_position_embeddings"}
    assert adopt(args, saved) == args | {name: saved[name] for name in model_and_tokenizer}
    scaled = {"lr_scale_rule", "lr_scale_base_batch_size"}
    typed = curves | {"lr": 1.0, "lr_scale_rule": "sqrt", "lr_scale_base_batch_size": 8, "seed": 3}
    followed = {name: saved[name] for name in names_by_resume("curve") if name not in scaled}
    assert adopt(typed, saved) == curves | {"seed": 3} | followed


def test_each_default_is_within_its_bounds():
    for one in options():
        if one.at_least is not None or one.positive or one.share:
            assert one.type in (int, float), one.name
        if one.default is not None and one.at_least is not None and not one.many:
            assert one.default >= one.at_least, one.name
        assert not one.positive or one.default is None or one.default > 0, one.name
        assert not one.share or (one.default is not None and 0 <= one.default < 1), one.name
