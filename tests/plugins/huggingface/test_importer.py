"""Weights go from a Hugging Face folder into a checkpoint and back in pieces of a few hundred bytes, and are the same;
an export is in its place whole or not at all."""

import json
import math
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.checkpoint.dtypes import ARRAYS, DTYPES, converted
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.checkpoint_tools import copying, single_process
from megatron_ext.plugins.checkpoint_tools.tensors import Tensors
from megatron_ext.plugins.families.hf_config import read_hf_config
from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping
from megatron_ext.plugins.huggingface import exporter, importer, saved_model
from megatron_ext.plugins.huggingface.commands import convert_checkpoint
from megatron_ext.plugins.huggingface.exporter import export_huggingface
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder
from megatron_ext.plugins.huggingface.importer import import_huggingface
from megatron_ext.plugins.huggingface.safetensors import create
from megatron_ext.plugins.huggingface.saved_model import SavedModel
from megatron_ext.train.configure import configure
from tests.support.crashes import Disk
from tests.support.full_disk import files_up_to

_LLAMA = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 103,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **_LLAMA},
    "gpt2": {
        "model_type": "gpt2",  # whose matrices lie transposed
        "n_embd": 24,
        "n_inner": 40,
        "n_layer": 2,
        "n_head": 4,
        "vocab_size": 103,
        "n_positions": 32,
    },
    "mixtral": {"model_type": "mixtral", **_LLAMA, "num_local_experts": 3, "num_experts_per_tok": 2},
}


def _write(folder: Path, model: str | dict[str, Any]) -> dict[str, np.ndarray]:
    """Write a model of random weights in fp32, one of `MODELS` by name or a config.json, and return them."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODELS[model] if isinstance(model, str) else model))
    family, values = read_hf_config(folder)
    config = resolve(values, Facts())
    shapes = {n: shape for part in state_dict_mapping(config, family) for n, shape in part.tensor_shapes().items()}
    generator, tensors = np.random.default_rng(0), {}
    for tensor, entry in create(folder / "model.safetensors", shapes, "F32").items():
        tensors[tensor] = generator.standard_normal(entry.shape, np.float32)
        entry.whole(writable=True)[...] = tensors[tensor]
    return tensors


def _read(folder: Path) -> dict[str, np.ndarray]:
    return {name: np.array(entry.whole()) for name, entry in HFFolder(folder).entries.items()}


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of some rows, which divide no tensor evenly."""
    monkeypatch.setattr(single_process, "_CHUNK_BYTES", 700)
    for module in (copying, importer, exporter):
        monkeypatch.setattr(module, "BLOCK", 300)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", MODELS)
def test_weights_go_there_and_back(name: str, tmp_path: Path) -> None:
    """In the same precision, and in another, where each number is computed; into one file and into several."""
    weights = _write(tmp_path / "source", name)
    import_huggingface(tmp_path / "source", tmp_path / "saved")
    for code, size in (("F32", 10**9), ("F32", 3000), ("BF16", 3000), ("F16", 10**9)):
        target = tmp_path / f"{code}_{size}"
        exported = export_huggingface(
            SavedModel(tmp_path / "saved"), target, dtype=code, max_shard_size=size, with_tokenizer=False
        )
        assert (exported.files > 1) == (size == 3000)
        found = _read(target)
        assert found.keys() == weights.keys()
        for tensor, values in weights.items():
            assert found[tensor].dtype == ARRAYS[code]
            assert np.array_equal(found[tensor], converted(values, "F32", code)), tensor
        itemsize = np.dtype(ARRAYS[code]).itemsize
        assert exported.size == sum(values.size for values in weights.values()) * itemsize


NEMOTRON = {"model_type": "nemotron", **_LLAMA, "num_attention_heads": 6, "num_key_value_heads": 6}


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("code", ["F32", "BF16", "F16"])
def test_norms_stored_as_what_they_differ_from_1(code: str, tmp_path: Path) -> None:
    """Our model has the sum, rounded once; an export gives what an import makes the same of, bit for bit."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    weights = {name: converted(values, "F32", code) for name, values in _write(source, NEMOTRON).items()}
    for name, entry in create(source / "model.safetensors", {n: w.shape for n, w in weights.items()}, code).items():
        entry.whole(writable=True)[...] = weights[name]
    import_huggingface(source, saved)
    found, dtype = Tensors(saved / "iter_0000000"), getattr(torch, DTYPES[code])
    for ours, theirs in (("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "post_attention_layernorm")):
        for kind, added in (("weight", 1.0), ("bias", 0.0)):
            layers = [weights[f"model.layers.{layer}.{theirs}.{kind}"] for layer in range(2)]
            expected = torch.from_numpy(np.stack(layers)).view(dtype).double() + added
            assert torch.equal(found.read(f"decoder.layers.{ours}.{kind}"), expected.to(dtype)), (ours, kind)
    export_huggingface(SavedModel(saved), tmp_path / "back", with_tokenizer=False)
    import_huggingface(tmp_path / "back", tmp_path / "again")
    again, written = Tensors(tmp_path / "again" / "iter_0000000"), _read(tmp_path / "back")
    assert all(torch.equal(again.read(name), found.read(name)) for name in found.names())
    assert all(np.array_equal(written[name], weights[name]) for name in weights if "norm.weight" not in name)
    assert not np.array_equal(written["model.norm.weight"], weights["model.norm.weight"]), "a sum is rounded"


@pytest.mark.usefixtures("_small")
def test_a_checkpoints_precision_is_that_which_holds_all_weights(tmp_path: Path) -> None:
    """Of a folder with some tensors in bf16, the checkpoint has them in fp32, each as it was."""
    weights = _write(tmp_path / "source", "llama")
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_text((tmp_path / "source" / "config.json").read_text())
    files = {}
    for file, code, wanted in (("a.safetensors", "F32", False), ("b.safetensors", "BF16", True)):
        shapes = {name: values.shape for name, values in weights.items() if ("proj" in name) == wanted}
        for name, entry in create(mixed / file, shapes, code).items():
            entry.whole(writable=True)[...] = converted(weights[name], "F32", code)
            files[name] = file
            if wanted:
                weights[name] = converted(converted(weights[name], "F32", "BF16"), "BF16", "F32")
    (mixed / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    import_huggingface(mixed, tmp_path / "saved")
    export_huggingface(SavedModel(tmp_path / "saved"), tmp_path / "back", with_tokenizer=False)
    found = _read(tmp_path / "back")
    assert all(np.array_equal(found[name], values) for name, values in weights.items())
    assert math.prod(found["model.embed_tokens.weight"].shape) == 103 * 24


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"head_dim": 7}, "--kv-channels 7 with --rotary-percent 1 rotates 7 channels of each head"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5"),
        ({"model_type": "nothing"}, 'model_type "nothing" is not supported'),
    ],
)
def test_an_import_refuses_what_a_run_refuses(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """By the rules of a run, too: nobody learns at the start of the training that a checkpoint cannot be used."""
    source, saved = tmp_path / "source", tmp_path / "saved"
    _write(source, "llama")
    (source / "config.json").write_text(json.dumps({**MODELS["llama"], **change}))
    run = f"--load-hf {source} --seq-length 8 --micro-batch-size 1 --lr 1e-3 --train-iters 1 --mock-data --device cpu"
    with pytest.raises(ConfigurationError) as of_run:
        configure(shlex.split(run))
    with pytest.raises(ConfigurationError) as of_import:
        convert_checkpoint.main(["from-hf", "--load", str(source), "--save", str(saved)])
    [one], [other] = of_run.value.problems, of_import.value.problems
    assert problem in one
    assert other.endswith(one.removeprefix("--load-hf "))
    assert not saved.exists()


def test_an_export_is_there_whole_or_not_at_all(tmp_path: Path, watched_disk: Callable[[Path], Disk]) -> None:
    """Whenever the machine goes down; and when the function returns, it is on the disk."""
    _write(tmp_path / "source", "llama")
    import_huggingface(tmp_path / "source", tmp_path / "saved")
    place = tmp_path / "place"
    place.mkdir()
    disk = watched_disk(place)
    export_huggingface(SavedModel(tmp_path / "saved"), place / "model", max_shard_size=10**4, with_tokenizer=False)
    disk.end()
    whole = {path.name: path.read_bytes() for path in (place / "model").iterdir()}
    assert len(whole) > 4
    left = []
    for _, path in disk.crashes(tmp_path / "left"):
        model = path / "model"
        left.append({file.name: file.read_bytes() for file in model.iterdir()} if model.exists() else None)
    assert all(found is None or found == whole for found in left)
    assert left[0] is None
    assert left[-2:] == [whole, whole]


@pytest.mark.parametrize(("words", "code"), [([], "F32"), (["--dtype", "bf16"], "BF16"), (["--dtype", "fp16"], "F16")])
def test_the_tool_writes_the_precision_that_is_asked_for(
    words: list[str], code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []
    exported = SimpleNamespace(
        path=tmp_path, family=SimpleNamespace(architecture="Llama"), size=1, files=1, tokenizer=["tokenizer.json"]
    )
    monkeypatch.setattr(saved_model, "SavedModel", lambda path, averages: SimpleNamespace(dtype=lambda: "F32"))
    monkeypatch.setattr(
        exporter, "export_huggingface", lambda source, save, **how: asked.append((save, how)) or exported
    )
    line = ["to-hf", "--load", "ckpt", "--save", "model", "--no-verify", "--max-shard-size", "2MB", "--no-tokenizer"]
    assert convert_checkpoint.main([*line, *words, "--skip-tokenizer-check"]) == 0
    how = {"dtype": code, "max_shard_size": 2 * 10**6, "with_tokenizer": False, "check_tokenizer": None}
    assert asked == [("model", how)]


@pytest.mark.parametrize("number", [0, -1])
def test_a_check_reads_at_least_one_sample(number: int) -> None:
    line = ["to-hf", "--load", "ckpt", "--save", "model", "--check-samples", str(number)]
    with pytest.raises(ConfigurationError, match=f"--check-samples {number} must be positive; leave it out for 64"):
        convert_checkpoint.main(line)


def test_an_import_without_room_names_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "hf", "llama")
    save = tmp_path / "save"
    with files_up_to(1000), pytest.raises(OSError, match="File too large") as caught:
        import_huggingface(tmp_path / "hf", save)
    assert caught.value.filename == str(save / ".iter_0000000.partial/__0_0.distcp")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"No space left on device \([\d,]+ bytes are needed, 1,000 are free\)"):
        import_huggingface(tmp_path / "hf", save)
    assert os.listdir(save) == []
