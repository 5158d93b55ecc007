"""Folders of Hugging Face as they are read: which file holds a tensor, and which dtype holds all weights."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.families.registry import FAMILIES
from megatron_ext.plugins.huggingface import huggingface_folder as hf_folder
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder
from megatron_ext.plugins.huggingface.safetensors import Entry, create
from tests.support.hf_shapes import MODELS


def _folder(**dtypes: str) -> Any:
    made: Any = object.__new__(HFFolder)
    made.family = FAMILIES["llama"]
    made.entries = {name: Entry(Path("x"), code, (2,), 0) for name, code in dtypes.items()}
    return made


@pytest.mark.parametrize(
    ("codes", "all_held_by"),
    [("F16", "F16"), ("BF16", "BF16"), ("F16 BF16", "F32"), ("F16 BF16 F32", "F32"), ("F16 BF16 F64", "F64"),
     ("BF16 F32", "F32"), ("F32 F64", "F64"), ("I64 BF16", "BF16"), ("I64", "F16"), ("", "F16")],
)  # fmt: skip
def test_a_dtype_that_holds_all_weights(codes: str, all_held_by: str) -> None:
    assert _folder(**{f"t{number}": code for number, code in enumerate(codes.split())}).dtype() == all_held_by


def test_a_tied_head_may_be_there_twice_and_not_differ(tmp_path: Path) -> None:
    """In the last row alone, in the dtype alone, or in the shape."""
    values = np.arange(12, dtype=np.float32).reshape(4, 3)
    for number, (other, differs) in enumerate((
        (values, False), (values + (np.arange(4) == 3)[:, None], True), (values[:3], True),
        (values.view(np.uint16).astype(np.uint16).reshape(4, 6)[:, :3], True),
    )):  # fmt: skip
        code = "BF16" if other.dtype == np.uint16 else "F32"
        table = create(tmp_path / f"t{number}", {"table.weight": values.shape}, "F32")["table.weight"]
        head = create(tmp_path / f"h{number}", {"lm_head.weight": other.shape}, code)["lm_head.weight"]
        table.whole(writable=True)[...] = values
        head.whole(writable=True)[...] = other
        entries = {"lm_head.weight": head, "table.weight": table}
        assert hf_folder.differ(entries, "lm_head.weight", "table.weight") == differs
        assert not hf_folder.differ({"table.weight": table}, "lm_head.weight", "table.weight")


def test_the_index_says_which_file_holds_a_tensor(tmp_path: Path) -> None:
    """Two files have one of the same name."""
    for file, names in (("a.safetensors", "xy"), ("b.safetensors", "yz")):
        create(tmp_path / file, dict.fromkeys(names, (1,)), "F32")
    index = tmp_path / "model.safetensors.index.json"
    for y in ("a", "b"):
        places = {"x": "a.safetensors", "y": f"{y}.safetensors", "z": "b.safetensors"}
        index.write_text(json.dumps({"weight_map": places}))
        assert {name: entry.path.name for name, entry in hf_folder._entries(tmp_path).items()} == places
    index.write_text(json.dumps({"weight_map": {"z": "a.safetensors"}}))
    with pytest.raises(DataError, match="places z in a file that does not hold it"):
        hf_folder._entries(tmp_path)
    for wrong in ({"x": 5, "y": "a.safetensors"}, ["x"]):
        index.write_text(json.dumps({"weight_map": wrong}))
        with pytest.raises(DataError, match="is not the index of a sharded model"):
            hf_folder._entries(tmp_path)


def test_the_single_file_is_read_next_to_an_index(tmp_path: Path) -> None:
    """As transformers does, which leaves the old index behind when a model is saved again; a word says so."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    first, second = (AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=32, **sizes)) for _ in range(2))
    first.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = sorted(path.name for path in tmp_path.glob("model-*"))
    assert len(shards) > 1
    assert HFFolder(tmp_path).remarks == []
    second.save_pretrained(tmp_path)
    assert (tmp_path / hf_folder.INDEX).exists(), "transformers no longer leaves it"
    for gone in (False, True):
        if gone:
            (tmp_path / shards[0]).unlink(missing_ok=True)
        read = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
        found = HFFolder(tmp_path)
        for name, entry in found.entries.items():
            assert np.array_equal(np.array(entry.whole()).reshape(read[name].shape), read[name].numpy()), name
        [remark] = found.remarks
        assert f"model.safetensors is read, as by transformers, and not {shards[0]}" in remark
    (tmp_path / hf_folder.INDEX).write_text("{")
    assert HFFolder(tmp_path).remarks == []


def test_a_folder_whose_weights_are_a_file_of_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Llama 2"]))
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF\x03\x00\x00\x00")
    with pytest.raises(ConfigurationError, match="safetensors"):
        HFFolder(tmp_path)


def test_a_weight_of_a_type_that_has_no_sign_is_refused_by_name(tmp_path: Path) -> None:
    """Of float8_e8m0fnu, in which torch makes 1 of -1."""
    tensors = {"model.embed_tokens.weight": torch.ones(4, 3).to(torch.float8_e8m0fnu)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(MODELS["Llama 2"]))
    with pytest.raises((ConfigurationError, DataError), match="F8_E8M0"):
        HFFolder(tmp_path)
