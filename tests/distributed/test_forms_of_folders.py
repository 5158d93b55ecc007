"""Folders that hold the same model in other forms: as transformers writes them after a load, with stacked experts, and
quantized, compared with what transformers and its own functions make of the same bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import DataError
from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder
from megatron_ext.plugins.huggingface.load_hf import read_rows
from megatron_ext.plugins.huggingface.tiny_models import model_with_logits
from tests.support.hf_models import quiet_transformers, write_model
from tests.support.hf_shapes import MODELS
from tests.support.plain_process import in_plain_process

# Of the second tier: a type in tests/distributed/test_huggingface.py.
pytestmark = pytest.mark.full

quiet_transformers()


def _parameters(folder: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return all our parameters as --load-hf reads them in fp32, and what is said of the folder."""
    source = HFFolder(folder)
    config = resolve(source.values, Facts())
    source.check(config)
    found = {}
    for mapping in state_dict_mapping(config, source.family):
        whole = found[mapping.parameter.name] = torch.empty(mapping.parameter.shape)
        read_rows(source, mapping, range(len(whole)), slice(None), whole)
    return found, source.remarks


def _assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> list[str]:
    found, remarks = _parameters(folder)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name
    return remarks


SHAPES = {settings["model_type"]: name for name, settings in reversed(MODELS.items())}
"""Every type -> the first of its shapes."""


def _saved_after_a_load(folder: str, again: str, shards: str, own: str) -> bool:
    """By transformers: in one file and in several, by the names of its release 4.57 where that has the type; and, as
    nobody publishes it, by the names that the model has in memory. Return whether it has a class for the type: a text
    model inside of another model may have none, and is in no such folder."""
    from transformers import AutoConfig, PreTrainedModel

    kind = type(model_with_logits(AutoConfig.from_pretrained(folder)))
    if not issubclass(kind, PreTrainedModel):
        return False
    model: Any = kind.from_pretrained(folder)
    model.save_pretrained(again)
    model.save_pretrained(shards, max_shard_size="60KB")
    model.save_pretrained(own, save_original_format=False)
    return True


def _rewritten(folder: Path, source: Path, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _is_refused(folder: Path) -> bool:
    """Whether the tensors are said to be none of the model, and not read as another one's."""
    try:
        _parameters(folder)
    except DataError as error:
        return "config.json does not match the tensors" in str(error)
    return False


@pytest.mark.parametrize("kind", sorted(SHAPES))
def test_every_form_of_every_type(kind: str, tmp_path: Path) -> None:
    """The folder as published is read as test_huggingface.py compares it; all others are read as the same numbers."""
    published, again, shards, own, bare, stale = (
        tmp_path / name for name in ("published", "again", "shards", "own", "bare", "stale")
    )
    model: Any = write_model(published, SHAPES[kind])
    expected, tensors = _parameters(published)[0], load_file(published / "model.safetensors")
    has_a_class = in_plain_process(_saved_after_a_load, *map(str, (published, again, shards, own)))
    first = f"{model.base_model_prefix}."
    _rewritten(bare, published, {name.removeprefix(first): tensor for name, tensor in tensors.items()})
    _rewritten(stale, published, tensors)
    gone = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (stale / "model.safetensors.index.json").write_text(json.dumps(gone))
    assert (len([*shards.glob("*.safetensors")]) > 1) == has_a_class
    for folder in (again, shards, bare, stale) if has_a_class else (bare, stale):
        remarks = _assert_same(folder, expected)
        assert any("model-00001-of-00002.safetensors" in one for one in remarks) == (folder == stale), folder.name
    if has_a_class and not _is_refused(own):
        _assert_same(own, expected)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", ["Qwen3-MoE", "Qwen3.5 with experts", "DeepSeek-V3"])
def test_matrices_of_all_experts_in_one_tensor(name: str, turned: bool, tmp_path: Path) -> None:
    apart, stacked = tmp_path / "apart", tmp_path / "stacked"
    write_model(apart, name)
    tensors = load_file(apart / "model.safetensors")
    ones = {one for one in tensors if ".experts." in one}
    assert ones
    made = {one: tensor for one, tensor in tensors.items() if one not in ones}
    for mixture in sorted({one.partition(".experts.")[0] + ".experts." for one in ones}):
        count = len({one.removeprefix(mixture).partition(".")[0] for one in ones if one.startswith(mixture)})
        parts = {
            kind: torch.stack([tensors[f"{mixture}{number}.{kind}.weight"] for number in range(count)])
            for kind in ("gate_proj", "up_proj", "down_proj")
        }
        both = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        for kind, tensor in (("gate_up_proj", both), ("down_proj", parts["down_proj"])):
            made[f"{mixture}{kind}"] = (tensor.mT if turned else tensor).contiguous()
    stacked.mkdir()
    (stacked / "config.json").write_bytes((apart / "config.json").read_bytes())
    save_file(made, stacked / "model.safetensors", {"format": "pt"})
    _assert_same(stacked, _parameters(apart)[0])


def _with_quantization(source: Path, folder: Path, tensors: dict[str, torch.Tensor], quantized: dict[str, Any]) -> None:
    folder.mkdir()
    content = {**json.loads((source / "config.json").read_text()), "quantization_config": quantized}
    (folder / "config.json").write_text(json.dumps(content))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _as_expected(source: Path, folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return _parameters(folder)[0]


@pytest.mark.parametrize(
    ("block", "scale"), [((16, 8), "weight_scale_inv"), (None, "weight_scale_inv"), ((1, 0), "weight_scale")]
)
def test_8_bits(block: tuple[int, int] | None, scale: str, tmp_path: Path) -> None:
    """With a scale for each block, the last ones cut off, as DeepSeek-V3's kernel has them, for a tensor or a row."""
    write_model(tmp_path / "bf16", "Qwen3-MoE")
    quantized, expected = {}, {}
    for number, (name, tensor) in enumerate(load_file(tmp_path / "bf16" / "model.safetensors").items()):
        if tensor.dim() < 2 or "embed" in name or ".gate.weight" in name:
            quantized[name] = expected[name] = tensor.bfloat16()
            continue
        rows, columns = tensor.shape
        high, wide = (rows, columns) if block is None else (block[0], block[1] or columns)
        shape = (-(-rows // high), -(-columns // wide))
        scales = torch.rand(shape, generator=torch.Generator().manual_seed(number)) + 0.5
        bits = tensor.to(torch.float8_e4m3fn)
        factors = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[:rows, :columns]
        expected[name] = (bits.float() * factors).bfloat16()
        quantized[name] = bits
        stem = name.removesuffix("weight")
        quantized[f"{stem}{scale}"] = scales.reshape(()) if block is None else scales
        if block is None:
            quantized[f"{stem}activation_scale"] = torch.ones(())
    said: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": None if block is None else [*block]}
    if scale == "weight_scale":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
        said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    _with_quantization(tmp_path / "bf16", tmp_path / "fp8", quantized, said)
    remarks = _assert_same(tmp_path / "fp8", _as_expected(tmp_path / "bf16", tmp_path / "expected", expected))
    assert "quantized tensors are read as bf16" in " ".join(remarks)


def test_mxfp4(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 32}
    write_model(tmp_path / "bf16", "GPT-OSS", **sizes)
    quantized, expected = {}, {}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in load_file(tmp_path / "bf16" / "model.safetensors").items():
        quantized[name] = expected[name] = tensor.bfloat16()
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        experts, depth, out = tensor.shape
        blocks = torch.randint(0, 256, (experts, out, depth // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.randint(120, 130, (experts, out, depth // 32), dtype=torch.uint8, generator=generator)
        expected[name] = convert_moe_packed_tensors(blocks, scales).contiguous()
        assert expected[name].shape == tensor.shape
        del quantized[name]
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    _with_quantization(tmp_path / "bf16", tmp_path / "mxfp4", quantized, {"quant_method": "mxfp4"})
    _assert_same(tmp_path / "mxfp4", _as_expected(tmp_path / "bf16", tmp_path / "expected", expected))


def test_integers_of_4_bits(tmp_path: Path) -> None:
    """Packed as compressed-tensors packs them: the first value in the lowest bits, each above -8."""
    write_model(tmp_path / "bf16", "Qwen3-MoE", hidden_size=64)
    quantized, expected = {}, {}
    generator = torch.Generator().manual_seed(6)
    for name, tensor in load_file(tmp_path / "bf16" / "model.safetensors").items():
        quantized[name] = expected[name] = tensor.bfloat16()
        if ".experts." not in name:
            continue
        rows, columns = tensor.shape
        values = torch.randint(-8, 8, (rows, columns), generator=generator)
        scales = torch.rand((rows, columns // 16), generator=generator).bfloat16()
        expected[name] = values.bfloat16() * scales.repeat_interleave(16, 1)
        words = ((values + 8).view(rows, columns // 8, 8) << torch.arange(0, 32, 4)).sum(-1)
        packed = torch.where(words >= 2**31, words - 2**32, words).int()
        del quantized[name]
        quantized |= {f"{name}_packed": packed, f"{name}_scale": scales, f"{name}_shape": torch.tensor([rows, columns])}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    said = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
    _with_quantization(tmp_path / "bf16", tmp_path / "int4", quantized, said)
    _assert_same(tmp_path / "int4", _as_expected(tmp_path / "bf16", tmp_path / "expected", expected))
