"""Writes a checkpoint in one process, without process groups and without torch, and with a few blocks of a megabyte in
memory: by it, checkpoints of other programs become one that `--load` begins from.

It has the names and shapes that megatron-core gives the model in any layout (layers and experts stacked), so that every
layout reads it.
"""

import json
import math
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.checkpoint.dtypes import WIDTH
from megatron_ext.checkpoint.native import checkpoint_manifest, torch_dist
from megatron_ext.checkpoint.native.checkpoint_folder import CONFIG, make_partial, publish, saved_iterations
from megatron_ext.checkpoint.native.extra_files import write_versions
from megatron_ext.checkpoint.native.torch_archive import archive, tensor_pickle
from megatron_ext.checkpoint.native.torch_dist import Chunk, Tensor
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.config.schema import Config
from megatron_ext.durable import check_space, naming
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parts.catalogue import states
from megatron_ext.parts.own_parameters import layers_differ
from megatron_ext.parts.parameter import Parameter
from megatron_ext.plugins.checkpoint_tools.copying import FilePart, Literal, gather

_CHUNK_BYTES = 32 << 20


class Item(NamedTuple):
    """A part of a tensor, to be written."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor_size: tuple[int, ...]
    dtype: str
    elements: Callable[[], Iterable[FilePart]]

    @property
    def length(self) -> int:
        """Bytes of its elements."""
        return WIDTH[self.dtype] * math.prod(self.sizes)


def items(
    config: Config,
    parameter: Parameter,
    dtype: str,
    elements: Callable[[range], Iterable[FilePart]],
    prefix: str = "",
) -> Iterator[Item]:
    """Yield the parts of a parameter, or of a tensor that is saved with it under another prefix.

    Args:
        dtype: its name in safetensors.
        elements: returns the elements of some rows.
    """
    key, indices, stacked_sizes = stacked(config, parameter.name)
    rows, *rest = parameter.shape
    per_chunk = max(1, _CHUNK_BYTES // (WIDTH[dtype] * math.prod(rest)))
    for start in range(0, rows, per_chunk):
        part = range(start, min(start + per_chunk, rows))
        offsets = (*indices, start, *(0 for _ in rest))
        sizes = (*(1 for _ in indices), len(part), *rest)
        whole = (*stacked_sizes, rows, *rest)
        yield Item(f"{prefix}{key}", offsets, sizes, whole, dtype, lambda part=part: elements(part))


def write_checkpoint(
    destination: str | Path,
    config: Config,
    weights: Iterable[Item],
    common: Mapping[str, Any],
    add_files: Callable[[Path], object] = lambda folder: None,
) -> Path:
    """Write a checkpoint into the folder `destination`, which has none.

    Args:
        weights: all tensors, in the order in which they are written.
        common: entries that are no tensors, with the iteration.
        add_files: adds files of its own to the folder that it is given.
    Returns:
        The checkpoint's own folder.
    Raises:
        ConfigurationError: the destination has checkpoints.
        DataError: a file is shorter than its tensors.
        OSError: the destination cannot be written.
    """
    if saved_iterations(destination):
        raise ConfigurationError(f"--save {destination} holds checkpoints already; give a new folder")
    partial = make_partial(destination, common["iteration"])
    try:
        metadata, written = _write_shard(partial / "__0_0.distcp", _objects(config, common), weights)
        with naming(partial):
            (partial / ".metadata").write_bytes(metadata)
            (partial / "metadata.json").write_text(
                json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
            )
            (partial / CONFIG).write_text(to_yaml(config), encoding="utf-8")
            add_files(partial)
            write_versions(partial)
        others = [path for path in checkpoint_manifest.all_files(partial) if path.name not in written]
        checkpoint_manifest.write(partial, written | checkpoint_manifest.describe(partial, others))
        return publish(destination, common["iteration"])
    finally:
        shutil.rmtree(partial, ignore_errors=True)


_STACKED = re.compile(
    r"(?:decoder\.layers\.(\d+)|(mtp\.layers\.\d+\.(?:transformer_layer|mtp_model_layer\.layers\.\d+)))\.(?:mlp\.experts\.(\d+)\.)?(.*)"
)


class Stacked(NamedTuple):
    """Place of a parameter, or a state, in a checkpoint."""

    key: str
    indices: tuple[int, ...]
    """Indices of its layer, and of its expert, in the tensor of all: [layers, ...], [layers, experts, ...]."""

    sizes: tuple[int, ...]
    """Numbers of layers, and of experts, in that tensor."""


def stacked(config: Config, name: str) -> Stacked:
    """Return the place of a parameter in a checkpoint: the experts of a layer are one tensor, and so are layers, unless
    they have different parameters."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return Stacked(name, (), ())
    layer, ahead, expert, rest = match.groups()
    indices, sizes, prefix = (), (), f"{ahead or f'decoder.layers.{layer}'}."
    if layer is not None and not layers_differ(config):
        indices, sizes, prefix = (int(layer),), (config.model.num_layers,), "decoder.layers."
    if expert is None:
        return Stacked(f"{prefix}{rest}", indices, sizes)
    experts = config.model.num_experts or 0
    return Stacked(f"{prefix}mlp.experts.experts.{rest}", (*indices, int(expert)), (*sizes, experts))


def _write_shard(
    path: Path, saved: Iterable[tuple[str, Any]], weights: Iterable[Item]
) -> tuple[bytes, checkpoint_manifest.Files]:
    """Write the file of all weights and objects; returns the checkpoint's metadata, and the file's own entry."""
    parts, position = list[FilePart](), 0
    objects: dict[str, Chunk] = {}
    for key, value in saved:
        content, _ = archive(pickle.dumps([value], protocol=2), None)
        objects[key] = Chunk((), (), path.name, position, len(content))
        parts.append(Literal(len(content), content))
        position += len(content)
    chunks: dict[tuple[str, tuple[int, ...], str], list[Chunk]] = {}
    for item in weights:
        head, tail = archive(tensor_pickle(item.sizes, item.dtype), item.length)
        parts += [Literal(len(head), head), *item.elements(), Literal(len(tail), tail)]
        length = len(head) + item.length + len(tail)
        chunk = Chunk(item.offsets, item.sizes, path.name, position, length)
        chunks.setdefault((item.key, item.tensor_size, item.dtype), []).append(chunk)
        position += length
    check_space(path, position)
    try:
        size, checksum = gather(path, parts)
    except EOFError as error:
        raise DataError(f"{error}. Download or write it again.") from error
    assert size == position
    tensors = {key: Tensor(dtype, size, tuple(of_tensor)) for (key, size, dtype), of_tensor in chunks.items()}
    return torch_dist.write(tensors, objects), {path.name: {"bytes": size, "crc32": f"{checksum:08x}"}}


def _objects(config: Config, common: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for state in states(config):
        if state.kind == "buffer":
            continue  # which lies with the weights
        key, indices, sizes = stacked(config, state.name)
        yield f"{key}/shard_{indices[0] if indices else 0}_{sizes[0] if sizes else 1}", None
    content = {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False}
    yield "common_state/shard_0_1", {**common, "content_metadata": content}
