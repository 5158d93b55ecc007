"""Tensors of a folder that no parameter is read from, over all families: left out for a reason, or refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import DataError
from megatron_ext.plugins.families.hf_config import read_hf_config
from megatron_ext.plugins.families.registry import FAMILIES
from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder
from megatron_ext.plugins.huggingface.importer import import_huggingface
from megatron_ext.plugins.huggingface.safetensors import create
from tests.support.hf_shapes import MODELS

Shapes = Mapping[str, tuple[int, ...]]


def _described(folder: Path, content: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Write this config.json; returns the tensors that it describes, by shape."""
    content = {name: value for name, value in content.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(content))
    family, values = read_hf_config(folder)
    mappings = state_dict_mapping(resolve(values, Facts()), family)
    vectors = family.vectors or "\0"
    shapes = {name: shape for one in mappings for name, shape in one.tensor_shapes().items()}
    return {name: shape[1:] if vectors in name else shape for name, shape in shapes.items()}


def _of_family(family: str) -> dict[str, Any]:
    """Return the config.json of a model without depths of multi-token prediction."""
    content = next(one for one in MODELS.values() if one["model_type"] == family)
    return {**content, **({"num_nextn_predict_layers": 0} if FAMILIES[family].ahead else {})}


def _read(folder: Path, shapes: Shapes, others: Shapes, code: str = "F16") -> HFFolder:
    """Write the tensors as 16 bits and the others as fp32, and read the folder."""
    create(folder / "model.safetensors", {**shapes, **others}, code, dict.fromkeys(others, "F32"))
    found = HFFolder(folder)
    found.check(resolve(found.values, Facts()))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tensor_without_a_place_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """A further layer, biases that config.json has not, and a tensor that nobody knows."""
    shapes, held = _described(tmp_path, _of_family(family)), FAMILIES[family]
    layers = {
        int(rest.partition(".")[0])
        for name in shapes
        for rest in [name.removeprefix(held.layers[:-3])]
        if rest[0].isdigit()
    }
    before, after = (held.layers.format(number) for number in (max(layers), max(layers) + 1))
    further = {name.replace(before, after): one for name, one in shapes.items() if name.startswith(before)}
    weights = {name: one for name, one in shapes.items() if name.endswith(".weight") and len(one) == 2}
    biases = {name.replace(".weight", ".bias"): one[:1] for name, one in weights.items()}
    biases = {name: one for name, one in biases.items() if name not in shapes}
    for others in (further, dict([*biases.items()][:1]), {"surplus": (3,)}, {f"{before}self_attn.more.weight": (2, 2)}):
        with pytest.raises(DataError, match=f"it has no place for {len(others)} of them: ") as refused:
            _read(tmp_path, shapes, others)
        assert all(name in str(refused.value) for name in sorted(others)[:20])


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_out_is_counted_and_named_and_says_nothing_of_the_dtype(family: str, tmp_path: Path) -> None:
    shapes, layer = _described(tmp_path, _of_family(family)), FAMILIES[family].layers.format(1)
    assert _read(tmp_path, shapes, {}).remarks == []
    frequencies, ahead = f"{layer}self_attn.rotary_emb.inv_freq", {"mtp.fc.weight": (4, 8), "mtp.norm.weight": (4,)}
    found = _read(tmp_path, shapes, {frequencies: (4,), **ahead, "vision_tower.x.weight": (2, 2)})
    for words in (
        f"1 rotary frequencies, which config.json gives ({frequencies})",
        "2 depths of multi-token prediction that are not trained (mtp.fc.weight, mtp.norm.weight)",
        "1 not of the text model (vision_tower.x.weight)",
    ):
        assert words in " ".join(found.remarks)
    assert found.entries.keys() == shapes.keys()
    assert found.dtype() == "F16"


def test_a_layer_of_multi_token_prediction_is_told_from_one_of_the_model(tmp_path: Path) -> None:
    """By its projection, where config.json does not say how many there are."""
    content = {**MODELS["DeepSeek-V3"], "num_nextn_predict_layers": 1}
    shapes = _described(tmp_path, content)
    trunk = _described(tmp_path, {**content, "num_nextn_predict_layers": 0})
    depth = {name: one for name, one in shapes.items() if name not in trunk}
    found = _read(tmp_path, trunk, depth)
    assert f"{len(depth)} depths of multi-token prediction that are not trained" in " ".join(found.remarks)
    without = {name: one for name, one in depth.items() if "eh_proj" not in name}
    with pytest.raises(DataError, match=f"it has no place for {len(without)} of them"):
        _read(tmp_path, trunk, without)


def test_masks_are_left_out(tmp_path: Path) -> None:
    """Old files of GPT-2 and of GPT-NeoX hold them."""
    for family, name in (("gpt2", "attn.bias"), ("gpt_neox", "attention.masked_bias")):
        shapes, mask = _described(tmp_path, _of_family(family)), FAMILIES[family].layers.format(0) + name
        assert f"1 causal masks ({mask})" in " ".join(_read(tmp_path, shapes, {mask: (1, 1, 8, 8)}).remarks)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_a_model_without_its_head(family: str, tmp_path: Path) -> None:
    """They have no prefix, as in all official exports of embedding models."""
    shapes = _described(tmp_path, {**_of_family(family)})
    head = {name for name in shapes if name.startswith(FAMILIES[family].names["output_layer"][0])}
    prefix = f"{FAMILIES[family].names['embedding.word_embeddings'][0].partition('.')[0]}."
    bare = {name.removeprefix(prefix): shape for name, shape in shapes.items()}
    assert _read(tmp_path, bare, {}).entries.keys() == shapes.keys()
    if head:
        without = {name: one for name, one in bare.items() if name not in head}
        with pytest.raises(DataError, match=f"{min(head)} is missing"):
            _read(tmp_path, without, {})


def test_a_model_without_its_head_can_have_its_embeddings_as_one(tmp_path: Path) -> None:
    """The fix that the message names is taken."""
    content = MODELS["Qwen3"]
    bare = {
        name.removeprefix("model."): one for name, one in _described(tmp_path, content).items() if "lm_head" not in name
    }
    with pytest.raises(DataError, match=r'be the embeddings, by "tie_word_embeddings": true in a copy'):
        _read(tmp_path, bare, {})
    _described(tmp_path, {**content, "tie_word_embeddings": True})
    assert _read(tmp_path, bare, {}).remarks == []


def test_frequencies_in_fp32_make_no_checkpoint_of_fp32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = _described(tmp_path, MODELS["Llama 2"])
    _read(tmp_path, shapes, {"model.layers.0.self_attn.rotary_emb.inv_freq": (6,)})
    saved = import_huggingface(tmp_path, tmp_path / "ours")
    assert "left out: 1 rotary frequencies" in capsys.readouterr().out
    assert "fp16: true" in (saved / "config.yaml").read_text()
