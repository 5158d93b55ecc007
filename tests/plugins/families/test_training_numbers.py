"""What a folder says of its training: without flags a run from it has its dropout and its load-balancing loss."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.parse.saved import read_saved
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.families.hf_config import hf_config, read_hf_config
from megatron_ext.plugins.families.registry import FAMILIES
from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping
from megatron_ext.plugins.huggingface.importer import import_huggingface
from megatron_ext.plugins.huggingface.safetensors import create
from megatron_ext.train.configure import Configured, configure
from tests.support.hf_models import quiet_transformers
from tests.support.hf_shapes import MODELS

quiet_transformers()

_ATTENTION = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
_BRANCHES = ("resid_pdrop", "hidden_dropout", "residual_dropout", "dropout", "hidden_dropout_prob")
_EXPERTS = ["Mixtral", "OLMoE", "Qwen3-MoE", "Granite with experts", "GPT-OSS", "Qwen3-Next", "ERNIE 4.5 with experts"]


def _content(family: str) -> dict[str, Any]:
    content = next(one for one in MODELS.values() if one["model_type"] == family)
    return {name: value for name, value in content.items() if value is not None}


def _read(folder: Path, content: dict[str, Any]) -> dict[str, Any]:
    (folder / "config.json").write_text(json.dumps(content))
    return read_hf_config(folder)[1]


def _configured(folder: Path, *flags: str) -> Configured:
    run = ["--mock-data", "--device", "cpu", "--seq-length", "8", "--micro-batch-size", "1", "--train-iters", "1"]
    return configure([*run, "--lr", "1e-3", "--load-hf", str(folder), *flags])


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_key_dropout_is_that_of_the_class(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family)
    of_attention, of_branches = (
        next((getattr(theirs, name) for name in names if hasattr(theirs, name)), 0.0)
        for names in (_ATTENTION, _BRANCHES)
    )
    found = _read(tmp_path, _content(family))
    assert (found["attention_dropout"], found["hidden_dropout"]) == (of_attention, of_branches)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_keys_of_a_class_hold(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    theirs, content = AutoConfig.for_model(family), _content(family)
    content |= {name: 0.25 for name in _ATTENTION if hasattr(theirs, name)}
    content |= {name: 0.125 for name in _BRANCHES if hasattr(theirs, name)}
    expected = (0.25 if {*_ATTENTION} & {*content} else 0.0, 0.125 if {*_BRANCHES} & {*content} else 0.0)
    if family == "mpt":  # whose class takes one rate for both
        content, expected = {**content, "attn_config": {"attn_pdrop": 0.25}}, (0.25, 0.25)
    found = _read(tmp_path, content)
    assert (found["attention_dropout"], found["hidden_dropout"]) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exported_model_says_the_rates_that_it_was_trained_with(family: str, tmp_path: Path) -> None:
    """By the keys that the class has: a run from the folder goes on with them."""
    from transformers import AutoConfig

    theirs = AutoConfig.for_model(family)
    values, one = _read(tmp_path, _content(family)), FAMILIES[family]
    rates = {
        "attention_dropout": 0.25 if any(hasattr(theirs, name) for name in _ATTENTION) else 0.0,
        "hidden_dropout": 0.125 if any(hasattr(theirs, name) for name in _BRANCHES) else 0.0,
    }
    if family == "mpt":  # transformers refuses every folder of it that states a rate: an export warns of it instead
        rates = dict.fromkeys(rates, 0.0)
    keys = hf_config(resolve({**values, **rates}, Facts()), one, "float32")
    assert {name: value for name, value in _read(tmp_path, keys).items() if name in rates} == rates
    assert all(hasattr(theirs, name) for name in one.dropouts)
    again = hf_config(resolve({**values, "attention_dropout": 0.0, "hidden_dropout": 0.0}, Facts()), one, "float32")
    assert not any(again[name] for name in one.dropouts)


@pytest.mark.parametrize("name", _EXPERTS)
def test_the_coefficient_of_the_load_balancing_loss_holds(name: str, tmp_path: Path) -> None:
    found = _read(tmp_path, {**_content(MODELS[name]["model_type"]), "router_aux_loss_coef": 0.03})
    assert found["moe_aux_loss_coeff"] == (0.03,)
    assert _configured(tmp_path).config.model.load_balancing_losses == {"aux_loss": 0.03}
    other = _configured(tmp_path, "--moe-router-load-balancing-type", "sinkhorn") if name == "Mixtral" else None
    assert other is None or other.config.model.load_balancing_losses == {}


def test_the_loss_of_each_sample_is_told_from_that_of_each_microbatch(tmp_path: Path) -> None:
    content = {**_content("deepseek_v2"), **MODELS["DeepSeek-V2"], "aux_loss_alpha": 0.001, "seq_aux": True}
    _read(tmp_path, {name: value for name, value in content.items() if value is not None})
    assert _configured(tmp_path).config.model.load_balancing_losses == {"seq_aux_loss": 0.001}


def test_a_flag_that_contradicts_the_folder_holds_and_is_said(tmp_path: Path) -> None:
    _read(tmp_path, {**_content("phi"), "attention_dropout": 0.2, "resid_pdrop": 0.1, "embd_pdrop": 0.1})
    plain, other = _configured(tmp_path), _configured(tmp_path, "--attention-dropout", "0.3")
    model = plain.config.model
    assert (model.attention_dropout, model.hidden_dropout) == (0.2, 0.1)
    assert not any("dropout" in words for words in plain.typed.warnings)
    assert other.config.model.attention_dropout == 0.3
    assert f"--load-hf: --attention-dropout 0.3, where {tmp_path} has 0.2: the flag holds" in other.typed.warnings
    _read(tmp_path, {**_content("phi"), "resid_pdrop": 0.1, "embd_pdrop": 0.0})
    assert any("embd_pdrop is 0.0, and the dropout of residual branches 0.1" in one
               for one in _configured(tmp_path).typed.warnings)  # fmt: skip


def test_a_dropout_that_is_none_is_refused_by_name(tmp_path: Path) -> None:
    for value in (1.0, -0.1, "x", True):
        with pytest.raises(ConfigurationError, match="and not a number of at least 0 and below 1"):
            _read(tmp_path, {**_content("llama"), "attention_dropout": value})


def test_an_import_keeps_them_for_the_run_that_begins_with_it(tmp_path: Path) -> None:
    (source := tmp_path / "hf").mkdir()
    values = _read(source, {**_content("llama"), "attention_dropout": 0.2})
    mappings = state_dict_mapping(resolve(values, Facts()), FAMILIES["llama"])
    shapes = {name: shape for one in mappings for name, shape in one.tensor_shapes().items()}
    create(source / "model.safetensors", shapes, "F32")
    saved = read_saved(import_huggingface(source, tmp_path / "ours") / "config.yaml") or {}
    assert (saved["attention_dropout"], saved["hidden_dropout"]) == (0.2, 0.0)
