"""From a Hugging Face folder to a checkpoint that `--load` begins from: iteration 0, weights alone.

One process without process groups, and never more than one chunk of a tensor in memory. The checkpoint has the names
and shapes that megatron-core gives the model in any layout (layers and experts stacked), so that every layout reads it.
"""

import io
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import BytesIOWriteData, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from megatron_ext.checkpoint import manifest
from megatron_ext.checkpoint.beside import HUGGINGFACE_FILES, TOKENIZER, write_versions
from megatron_ext.checkpoint.folder import CONFIG, make_partial, publish, saved_iterations
from megatron_ext.checkpoint.hf_read import HFFolder, safe_file
from megatron_ext.checkpoint.hf_stream import Buffer, HashingWriter, without_zip_checksums
from megatron_ext.config.families import Arranged, arrangement
from megatron_ext.config.files import to_yaml
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError

_CHUNK_BYTES = 32 << 20
# Modules for which megatron-core saves an object beside the weights, which is empty without FP8.
_WITH_EXTRA_STATE = ("self_attention.linear_proj", "self_attention.linear_qkv")
_WITH_EXTRA_STATE_IF_DENSE = ("mlp.linear_fc1", "mlp.linear_fc2")


def import_huggingface(source: str | Path, destination: str | Path) -> Path:
    """Write the checkpoint of iteration 0 into the folder `destination`. The dtype of the weights is kept.

    Returns:
        The checkpoint's own folder.
    Raises:
        ConfigurationError: the source cannot be read as a model of ours, or the destination has checkpoints.
        DataError: the source's tensors are not those that its `config.json` describes.
        OSError: the destination cannot be written.
    """
    folder = HFFolder(source)
    precision = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(folder.dtype())
    config = resolve({**folder.values, **({precision: True} if precision else {})}, Facts())
    folder.check(config)
    if saved_iterations(destination):
        raise ConfigurationError(f"--save {destination} holds checkpoints already; give a new folder")
    partial = make_partial(destination, 0)
    try:
        planner = _StreamingPlanner([*_weights(config, folder), *_objects(config)])
        writer = HashingWriter(partial)
        with without_zip_checksums():
            save({}, storage_writer=writer, planner=planner, no_dist=True)
        (partial / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )
        (partial / CONFIG).write_text(to_yaml(config), encoding="utf-8")
        copy_tokenizer(folder.path, partial / TOKENIZER)
        write_versions(partial)
        others = [path for path in manifest.all_files(partial) if path.name not in writer.files]
        manifest.write(partial, writer.files | manifest.describe(partial, others))
        return publish(destination, 0)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_tokenizer(source: Path, destination: Path) -> list[str]:
    """Copy the tokenizer's files that `source` has; returns their names."""
    names = [name for name in HUGGINGFACE_FILES if (source / name).exists()]
    if names:
        destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(safe_file(source, name), destination / name)
    return names


_STACKED = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.*)")


def stacked_key(name: str) -> tuple[str, tuple[int, ...]]:
    """A parameter's key in a checkpoint, and its place there: the layers of a model are one tensor, and so are the
    experts of a layer: [layers, ...] or [layers, experts, ...]."""
    found = _STACKED.fullmatch(name)
    if found is None:
        return name, ()
    layer, expert, rest = found.groups()
    if expert is None:
        return f"decoder.layers.{rest}", (int(layer),)
    return f"decoder.layers.mlp.experts.experts.{rest}", (int(layer), int(expert))


def stack_sizes(config: Config, place: tuple[int, ...]) -> tuple[int, ...]:
    """How many layers, and experts, the tensor holds in which a parameter has this place."""
    return (config.model.num_layers, config.model.num_experts or 0)[: len(place)]


_Source = Callable[[], torch.Tensor | io.BytesIO]


class _StreamingPlanner(DefaultSavePlanner):
    """Gives torch's writer each item when its turn comes, from a function, instead of from a state dict in memory."""

    def __init__(self, items: list[tuple[WriteItem, _Source]]):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items = [item for item, _ in items]
        self._sources = {item.index: source for item, source in items}

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._sources[write_item.index]()


def _weights(config: Config, folder: HFFolder) -> Iterator[tuple[WriteItem, _Source]]:
    dtype, buffer = folder.dtype(), Buffer()
    for arranged in arrangement(config, folder.family):
        key, place = stacked_key(arranged.parameter.name)
        rows, *rest = arranged.parameter.shape
        size = torch.Size([*stack_sizes(config, place), rows, *rest])
        per_chunk = max(1, _CHUNK_BYTES // (dtype.itemsize * (rest[0] if rest else 1)))
        for start in range(0, rows, per_chunk):
            part = range(start, min(start + per_chunk, rows))
            offsets = torch.Size([*place, start, *(0 for _ in rest)])
            sizes = torch.Size([*(1 for _ in place), len(part), *rest])
            data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(dtype), size)
            item = WriteItem(MetadataIndex(key, offsets), WriteItemType.SHARD, tensor_data=data)
            yield item, _chunk(folder, arranged, part, sizes, dtype, buffer)


def _chunk(
    folder: HFFolder, arranged: Arranged, rows: range, sizes: torch.Size, dtype: torch.dtype, buffer: Buffer
) -> _Source:
    def read() -> torch.Tensor:
        target = buffer.tensor((len(rows), *arranged.parameter.shape[1:]), dtype)
        folder.read(arranged, rows, slice(None), target)
        return target.view(sizes)

    return read


def _objects(config: Config) -> Iterator[tuple[WriteItem, _Source]]:
    layers = config.model.num_layers
    modules = (*_WITH_EXTRA_STATE, *(_WITH_EXTRA_STATE_IF_DENSE if config.model.num_experts is None else ()))
    for layer in range(layers):
        for module in modules:
            yield _object(f"decoder.layers.{module}._extra_state/shard_{layer}_{layers}", None)
    common = {
        "weights_only": True,
        "iteration": 0,
        "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False},
    }
    yield _object("common_state/shard_0_1", common)


def _object(key: str, value: Any) -> tuple[WriteItem, _Source]:
    buffer = io.BytesIO()
    torch.save([value], buffer)
    item = WriteItem(
        MetadataIndex(key), WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(buffer.getbuffer().nbytes)
    )
    return item, lambda: buffer
