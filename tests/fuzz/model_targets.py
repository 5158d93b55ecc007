"""Files of models and checkpoints, as targets of the fuzzer (`targets.py`)."""

import io
import json
import pickle
import random
import shlex
from argparse import Namespace
from pathlib import Path

import numpy as np

from megatron_ext.checkpoint.native import checkpoint_manifest, torch_dist
from megatron_ext.checkpoint.native.checkpoint_folder import find_all
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.cost.dry_run import describe
from megatron_ext.data.data_record import read_record
from megatron_ext.errors import DataError
from megatron_ext.plugins.families.hf_config import differences, read_hf_config
from megatron_ext.plugins.families.registry import FAMILIES
from megatron_ext.plugins.huggingface import safetensors
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder
from megatron_ext.plugins.migrate.deepspeed_checkpoint import torch_file
from megatron_ext.plugins.migrate.megatron_lm_checkpoint.saved_flags import read_args
from megatron_ext.train.configure import configure
from tests.fuzz.mutations import Read, changed

_HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "float32",
}
_HF_KEYS = (
    *("quantization_config", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers"),
    *("no_rope_layers", "mlp_only_layers", "decoder_sparse_step", "rope_parameters", "partial_rotary_factor"),
)
_JSON_VALUES = (None, True, -1, 0, 10**30, 10**400, 1e308, "x", "1", [], [1], {}, {"factor": "x"}, "gelu", float("nan"))


def hf_config(folder: Path) -> Read:
    """config.json of a Hugging Face folder, of any family, by bytes and by values."""

    def read(chance: random.Random) -> None:
        content = {**_HF, "model_type": chance.choice(["llama", *FAMILIES])}
        for _ in range(chance.choice((1, 2, 3))):
            content[chance.choice([*content, *_HF_KEYS])] = chance.choice(_JSON_VALUES)
        text = json.dumps(content).encode()
        (folder / "config.json").write_bytes(changed(text, chance) if chance.random() < 0.5 else text)
        _, values = read_hf_config(folder)
        config = resolve({**values, "seq_length": 8, "micro_batch_size": 1}, Facts(world_size=1))
        assert not differences(config, values)
        run = "--seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --dry-run --world-size 1"
        configured = configure(["--load-hf", str(folder), *shlex.split(run)])
        assert describe(configured.config)

    return read


def hf_folder(folder: Path) -> Read:
    """Index and safetensors files of a Hugging Face folder."""
    (folder / "config.json").write_text(json.dumps(_HF))
    names = {f"model.layers.{n}.input_layernorm.weight": "one.safetensors" for n in range(2)}
    index = json.dumps({"metadata": {}, "weight_map": names}).encode()
    tensors = dict.fromkeys(names, (16,))
    safetensors.create(folder / "one.safetensors", tensors, "F32")
    whole = (folder / "one.safetensors").read_bytes()

    def read(chance: random.Random) -> None:
        which = chance.random() < 0.5
        (folder / "model.safetensors.index.json").write_bytes(changed(index, chance) if which else index)
        (folder / "one.safetensors").write_bytes(whole if which else changed(whole, chance))
        entries = HFFolder(folder).entries
        for entry in entries.values():
            assert entry.path.parent == folder
            assert entry.shape is not None
            assert entry.offset + entry.row_bytes * (entry.shape[0] if entry.shape else 1) <= entry.path.stat().st_size

    return read


def safetensors_file(folder: Path) -> Read:
    """The header of a safetensors file: what is taken covers the file exactly."""
    path = folder / "x.safetensors"
    safetensors.create(path, {"a": (2, 3), "b": (4,), "é": (1, 1, 1)}, "F32")
    whole = path.read_bytes()

    def read(chance: random.Random) -> None:
        path.write_bytes(changed(whole, chance))
        entries = safetensors.read_header(path)
        size = sum(
            int(np.prod(entry.shape)) * safetensors.SAFETENSORS_WIDTHS[entry.dtype] for entry in entries.values()
        )
        length = int.from_bytes(path.read_bytes()[:8], "little")
        assert 8 + length + size == path.stat().st_size

    return read


def metadata(folder: Path) -> Read:
    """.metadata of a checkpoint: a pickle that is read as data."""
    chunks = tuple(torch_dist.Chunk((row, 0), (2, 3), "__0_0.distcp", 400 * row, 400) for row in (0, 2))
    whole = torch_dist.write(
        {"weight": torch_dist.Tensor("F32", (4, 3), chunks)}, {"s/shard_0_1": torch_dist.Chunk((), (), "a", 7, 9)}
    )

    def read(chance: random.Random) -> None:
        try:
            saved = torch_dist.read_all(io.BytesIO(changed(whole, chance)))
        except pickle.UnpicklingError as error:
            raise DataError(str(error)) from None
        for tensor in saved.tensors.values():
            for chunk in tensor.chunks:
                assert all(o + s <= t for o, s, t in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True))
                assert "/" not in chunk.file

    return read


def checkpoint(folder: Path) -> Read:
    """A checkpoint's files: one that was changed is never whole; its tracker may hold anything."""
    place = folder / "iter_0000003"
    place.mkdir()
    files = {name: bytes(range(200)) for name in (".metadata", "metadata.json", "__0_0.distcp", "config.yaml")}

    def read(chance: random.Random) -> None:
        for name, content in files.items():
            (place / name).write_bytes(content)
        checkpoint_manifest.write(place, checkpoint_manifest.describe(place, [place / name for name in files]))
        (folder / "latest_checkpointed_iteration.txt").write_bytes(b"3")
        target = chance.choice([*(place / name for name in (*files, "manifest.json")), *folder.glob("*.txt")])
        before = target.read_bytes()
        target.write_bytes(changed(before, chance))
        same = target.read_bytes() == before
        found = find_all(folder)[0]
        try:
            listed = checkpoint_manifest.read(found.path)
        except ValueError as error:
            raise DataError(str(error)) from None
        assert listed is not None
        wrong = checkpoint_manifest.problems(found.path, listed)
        assert bool(wrong) != (same or target.suffix == ".txt"), target
        read_args(found.path)
        read_record(place / "config.yaml")

    return read


def deepspeed_file(folder: Path) -> Read:
    """A file of torch.save, which is read as data: what is taken lies in the file."""
    import torch

    path = folder / "x.pt"
    content = {"a": torch.arange(6.0).view(2, 3), "args": Namespace(layers=2, names=["x"]), "b": torch.ones(4).half()}
    torch.save(content, path)
    whole = path.read_bytes()

    def read(chance: random.Random) -> None:
        path.write_bytes(changed(whole, chance))
        found = torch_file.read(path)
        for entry in found.values() if isinstance(found, dict) else ():
            if isinstance(entry, safetensors.Entry):
                size = int(np.prod(entry.shape)) * safetensors.SAFETENSORS_WIDTHS[entry.dtype]
                assert 0 <= entry.offset <= entry.offset + size <= path.stat().st_size

    return read
