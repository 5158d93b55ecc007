"""Flags, names of tensors and numbers in a checkpoint that Megatron-LM wrote; no two values are alike."""

import io
import itertools
import json
import pickle
import zipfile
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_ext.checkpoint.native import torch_dist
from megatron_ext.checkpoint.native.torch_dist import Chunk
from megatron_ext.config.parse.options import options_by_name
from megatron_ext.config.schema import Config
from megatron_ext.errors import DataError
from megatron_ext.plugins.migrate.megatron_lm_checkpoint import saved_flags
from megatron_ext.plugins.migrate.megatron_lm_checkpoint import state as megatron_lm
from tests.support.small_models import small_config

YES_NO = (False, True)


def _archive(args: Any, *, listed: bool, method: int = zipfile.ZIP_STORED) -> bytes:
    common = {"args": args, "iteration": 3}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", method) as file:
        file.writestr("archive/data.pkl", pickle.dumps([common] if listed else common, protocol=2))
    return content.getvalue()


def _shard(folder: Path, before: bytes, one: bytes, behind: bytes) -> None:
    """Write a checkpoint whose common state lies in the middle of a shard."""
    (folder / "__0_0.distcp").write_bytes(before + one + behind)
    place = Chunk((), (), "__0_0.distcp", len(before), len(one))
    (folder / ".metadata").write_bytes(torch_dist.write({}, {"common_state/shard_0_1": place}))


FLAGS = {
    "number": 2,
    "share": 0.5,
    "switch": True,
    "text": "rope",
    "nothing": None,
    "list": [1, 2],
    "pair": (0.9, None),
    "empty": [],
}


def test_flags_are_numbers_texts_and_lists_of_them(tmp_path: Path) -> None:
    """In either place, next to other objects; what else a flag may be is left out, and so is a list with one such."""
    args = Namespace(**FLAGS, dtype=torch.bfloat16, mixed=[1, torch.bfloat16], table={"a": 1}, path=Path("a"))
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    (old / "common.pt").write_bytes(_archive(args, listed=False))
    assert saved_flags.read_args(old) == FLAGS
    new.mkdir()
    other = _archive(Namespace(number=77), listed=True)
    _shard(new, other, _archive(args, listed=True), other)
    assert saved_flags.read_args(new) == FLAGS


def test_flags_of_another_kind_or_size_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small file may unfold to a large one."""
    path = tmp_path / "common.pt"
    path.write_bytes(_archive(SimpleNamespace(**FLAGS), listed=False))
    assert saved_flags.read_args(tmp_path) is None
    packed = _archive(Namespace(text="a" * 5000), listed=False, method=zipfile.ZIP_DEFLATED)
    path.write_bytes(packed)
    assert saved_flags.read_args(tmp_path) == {"text": "a" * 5000}
    assert len(packed) < 1000
    monkeypatch.setattr(saved_flags, "_LARGEST", 1000)
    assert saved_flags.read_args(tmp_path) is None


def test_the_model_under_our_names() -> None:
    """A bias that is added is one that is not left out; epsilon has another name there."""
    given = {"layernorm_epsilon": 1e-6, "add_bias_linear": True, "hidden_size": 8}
    assert saved_flags.model_flags(given) == {**given, "norm_epsilon": 1e-6, "disable_bias_linear": False}
    assert saved_flags.model_flags({"add_bias_linear": False})["disable_bias_linear"] is True
    assert saved_flags.model_flags({}) == {"norm_epsilon": None, "disable_bias_linear": None}


def test_latent_attention_has_heads_and_a_rotation_of_its_own() -> None:
    found = saved_flags.model_flags({"multi_latent_attention": True, "kv_channels": 16, "rope_type": None})
    assert (found["kv_channels"], found["rope_type"]) == (None, "yarn")
    assert saved_flags.model_flags({"multi_latent_attention": True, "rope_type": "rope"})["rope_type"] == "rope"
    assert saved_flags.model_flags({"multi_latent_attention": False, "kv_channels": 16})["kv_channels"] == 16


def test_windows_and_patterns_over_layers_under_our_names() -> None:
    given = {"window_size": (4095, 0), "window_attn_skip_freq": 4, "no_rope_freq": [0, 1], "moe_layer_freq": [0, 1, 1]}
    written = {"window_size": "4095,0", "window_attn_skip_freq": "4", "no_rope_freq": "[0,1]"}
    found = saved_flags.model_flags(given)
    assert {name: found[name] for name in given} == {**written, "moe_layer_freq": "[0,1,1]"}
    for everywhere in (1, [1, 1], None):
        assert saved_flags.model_flags({"moe_layer_freq": everywhere})["moe_layer_freq"] is None


@pytest.mark.parametrize(
    ("grouped", "bias", "scaled", "experts"), itertools.product(YES_NO, (True, False, None), YES_NO, (None, 4))
)
def test_flags_without_effect_are_not_taken(
    grouped: bool, bias: bool | None, scaled: bool, experts: int | None
) -> None:
    """Megatron-LM saves a value for each flag, also where another flag has switched it off."""
    args = {
        "num_layers": 3, "hidden_size": 8, "layernorm_epsilon": 1e-6, "vocab_size": 100,
        "group_query_attention": grouped, "num_query_groups": 2,
        "add_qkv_bias": True, "rotary_base": 5000,
        "use_rope_scaling": scaled, "rope_scaling_factor": 4.0,
        "num_experts": experts, "moe_router_topk": 2, "moe_router_score_function": "sigmoid",
        "normalization": "BatchNorm", "squared_relu": None, "unknown_here": 5,
    }  # fmt: skip
    if bias is not None:
        args["add_bias_linear"] = bias
    expected: dict[str, Any] = {
        "num_layers": 3, "hidden_size": 8, "norm_epsilon": 1e-6, "rotary_base": 5000,
        "group_query_attention": grouped, "use_rope_scaling": scaled,
    }  # fmt: skip
    if grouped:
        expected["num_query_groups"] = 2
    if bias is not None:
        expected["disable_bias_linear"] = not bias
    if bias is False:
        expected["add_qkv_bias"] = True
    if scaled:
        expected["rope_scaling_factor"] = 4.0
    if experts is not None:
        expected |= {"num_experts": 4, "moe_router_topk": 2, "moe_router_score_function": "sigmoid"}
    assert saved_flags.saved_model(args) == expected


def _same(config: Config) -> dict[str, Any]:
    """Return Megatron-LM's flags of a model of ours."""
    model = vars(config.model)
    flags = {name: value for name, value in model.items() if name in options_by_name()}
    flags["layernorm_epsilon"] = flags.pop("norm_epsilon")
    flags["add_bias_linear"] = not flags.pop("disable_bias_linear")
    return {name: value for name, value in flags.items() if name != "make_vocab_size_divisible_by"}


def _different(config: Config, **changed: Any) -> list[str]:
    return megatron_lm.different_flags({"args": Namespace(**{**_same(config), **changed})}, config)


@pytest.mark.parametrize(
    ("flags", "refused"), [({}, True), ({"no_load_optim": True}, False), ({"finetune": True}, False)]
)
def test_an_optimizer_in_flat_buffers_matters_only_where_it_is_read(flags: dict[str, bool], refused: bool) -> None:
    config = small_config()
    config = replace(config, checkpoint=replace(config.checkpoint, **flags))
    common = {
        "args": Namespace(**_same(config)),
        "optimizer": [{"param_state": {"param_state_sharding_type": "dp_reshardable"}}],
        "iteration": 3,
    }
    run: Any = SimpleNamespace(config=config)
    if refused:
        with pytest.raises(DataError, match=r"^the checkpoint a, .* flat buffers .* or add --no-load-optim to go on"):
            megatron_lm.MegatronLM.as_ours(run, Path("a"), common)
    else:
        assert megatron_lm.MegatronLM.as_ours(run, Path("a"), common)["train_state"]["iteration"] == 3


def test_every_other_flag_is_named_with_both_values() -> None:
    config = small_config()
    assert _different(config) == []
    assert _different(config, num_layers=5, layernorm_epsilon=1e-3, add_bias_linear=False) == [
        "--num-layers 5 (given: 4)",
        "--disable-bias-linear True (given: False)",
        "--norm-epsilon 0.001 (given: 1e-05)",
    ]
    assert _different(config, vocab_size=77) == [], "the tokenizer may have more"
    assert _different(config, apply_layernorm_1p=True) == [
        "--apply-layernorm-1p True (here a norm's weights are kept as they multiply, and not less one)"
    ]
    function = {"layernorm_epsilon": 1e-3, "rotary_base": 77}
    assert len(_different(config, **function)) == 2
    tuned = replace(config, checkpoint=replace(config.checkpoint, finetune=True))
    assert _different(tuned, **function) == [], "another task may compute otherwise"
    assert _different(tuned, num_layers=5) == ["--num-layers 5 (given: 4)"]


@pytest.mark.parametrize(
    ("switch", "name", "off", "value", "another"),
    [
        ("group_query_attention", "num_query_groups", False, 4, 2),
        ("disable_bias_linear", "add_qkv_bias", False, False, True),
        ("use_rope_scaling", "rope_scaling_factor", False, 8.0, 4.0),
    ],
)
def test_a_flag_without_effect_on_both_sides_may_differ(
    switch: str, name: str, off: bool, value: Any, another: Any
) -> None:
    """Where one of the two runs has it switched on, it may not."""
    flag = f"--{name.replace('_', '-')} {another} (given: {value})"
    for ours, theirs in itertools.product(YES_NO, repeat=2):
        config = small_config({switch: ours, name: value})
        given: dict[str, Any] = {"add_bias_linear": not theirs} if switch == "disable_bias_linear" else {switch: theirs}
        found = _different(config, **given, **{name: another})
        assert (flag in found) == (ours or theirs)
        assert (len(found) > (flag in found)) == (ours != theirs), "the switch itself"


def test_what_is_not_given_is_compared_where_it_computes() -> None:
    """A router's dtype of None is one way to compute; a size that a run of before does not name is unknown."""
    config = small_config({"moe_router_dtype": "fp32"})
    assert _different(config, moe_router_dtype=None) == ["--moe-router-dtype None (given: fp32)"]
    assert _different(config, ffn_hidden_size=None, kv_channels=None) == []


def test_the_padded_vocabulary_is_computed_as_it_was_padded() -> None:
    """By the divisor and the tensor-parallel ranks of the run that saved; ours may have others."""
    config = small_config(layout={"world_size": 4, "tensor_model_parallel_size": 4})
    assert config.data.vocab_size == 250
    for given, padded in (
        ({}, 256), ({"tensor_model_parallel_size": 3}, 384), ({"make_vocab_size_divisible_by": 10}, 250),
        ({"make_vocab_size_divisible_by": 10, "tensor_model_parallel_size": 3}, 270),
    ):  # fmt: skip
        assert _different(config, padded_vocab_size=padded, **given) == []
        assert _different(config, padded_vocab_size=padded + 1, **given) == [
            f"a vocabulary that is padded to {padded + 1} entries (given: --vocab-size 250)"
        ]
    unknown = replace(config, data=replace(config.data, vocab_size=None))
    assert _different(unknown, padded_vocab_size=999) == []


NAMES = {
    "decoder.layers.input_layernorm.weight": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "decoder.layers.pre_mlp_layernorm.bias": "decoder.layers.mlp.linear_fc1.layer_norm_bias",
    "optimizer.state.param.decoder.final_layernorm.weight": (
        "optimizer.state.fp32_param.decoder.final_layernorm.weight"
    ),
    "optimizer.state.param.decoder.layers.input_layernorm.weight": (
        "optimizer.state.fp32_param.decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    ),
    "optimizer.state.exp_avg.decoder.layers.pre_mlp_layernorm.weight": (
        "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.layer_norm_weight"
    ),
}


def _asked(names: Any) -> dict[str, ShardedObject]:
    return {name: ShardedObject(name, None, (1,), (0,)) for name in names}


def test_a_tensor_is_read_under_the_name_that_the_checkpoint_has() -> None:
    """Its own name where it has that; and its own where it has none, which the message of loading then names."""
    for saved in (NAMES.values(), NAMES.keys(), ()):
        asked = _asked(NAMES)
        assert megatron_lm.rename({"optimizer": {"nested": [asked]}}, set(saved)) == {}
        read = {name: tensor.key for name, tensor in asked.items()}
        assert read == (NAMES if set(saved) == set(NAMES.values()) else {name: name for name in NAMES})


def test_weights_may_lie_fused_where_their_copies_are_not_renamed() -> None:
    """The distributed optimizer's copies in fp32 are `param` there, too."""
    own = "optimizer.state.param.decoder.layers.input_layernorm.weight"
    theirs = "optimizer.state.param.decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    asked = _asked([own])
    megatron_lm.rename({"optimizer": asked}, {theirs})
    assert asked[own].key == theirs


@pytest.mark.parametrize(("per_token", "mark"), [({}, ', "of_mean": true'), ({"calculate_per_token_loss": True}, "")])
def test_a_loss_scale_becomes_a_plain_number(per_token: dict[str, bool], mark: str) -> None:
    """It is that of the mean loss, but with Megatron-LM's --calculate-per-token-loss."""
    args = Namespace(seq_length=1, **per_token)
    common = {"args": args, "iteration": 1, "optimizer": {"grad_scaler": {"scale": torch.ones(1)}}}
    assert json.dumps(megatron_lm.as_ours(common)["grad_scaler"]) == f'{{"scale": 1.0{mark}}}'


def test_extra_states_are_left_out_of_every_chunk() -> None:
    state: dict[str, Any] = {
        "model0": _asked(["a.weight", "a._extra_state"]),
        "model1": _asked(["b._extra_state", "b.weight", "c._extra_state"]),
        "optimizer": _asked(["d._extra_state"]),
    }
    taken = megatron_lm.rename(state, ())
    assert taken == {"model0": ["a._extra_state"], "model1": ["b._extra_state", "c._extra_state"]}
    assert {key: list(part) for key, part in state.items()} == {
        "model0": ["a.weight"], "model1": ["b.weight"], "optimizer": ["d._extra_state"]
    }  # fmt: skip


def test_who_wrote_a_checkpoint() -> None:
    assert megatron_lm.wrote({"args": Namespace()})
    assert not megatron_lm.wrote({"args": {"num_layers": 2}})
    assert not megatron_lm.wrote({"iteration": 3})
