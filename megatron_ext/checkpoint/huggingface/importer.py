"""Imports a Hugging Face folder as a checkpoint that `--load` begins from: iteration 0, weights alone.

One process does it, without process groups and without torch, and with a few blocks of a megabyte in memory. The
checkpoint has the names and shapes that megatron-core gives the model in any layout (layers and experts stacked), so
that every layout reads it.
"""

import functools
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.checkpoint.copying import BLOCK, ComputedBytes, FilePart, FileRange, Files, Literal, Zeros, gather
from megatron_ext.checkpoint.dtypes import WIDTH
from megatron_ext.checkpoint.huggingface.huggingface_folder import HFFolder, safe_file
from megatron_ext.checkpoint.huggingface.safetensors import Entry
from megatron_ext.checkpoint.native import checkpoint_manifest, torch_dist
from megatron_ext.checkpoint.native.checkpoint_folder import CONFIG, make_partial, publish, saved_iterations
from megatron_ext.checkpoint.native.extra_files import HUGGINGFACE_FILES, TOKENIZER, write_versions
from megatron_ext.checkpoint.native.torch_archive import archive, tensor_pickle
from megatron_ext.checkpoint.native.torch_dist import Chunk, Tensor
from megatron_ext.config.parse.config_file import to_yaml
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.families import ParameterMapping, state_dict_mapping
from megatron_ext.parts.catalogue import states
from megatron_ext.parts.stack import stack
from megatron_ext.terminal import say

_CHUNK_BYTES = 32 << 20


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
    precision = {"BF16": "bf16", "F16": "fp16"}.get(folder.dtype())
    config = resolve({**folder.values, **({precision: True} if precision else {})}, Facts())
    folder.check(config)
    if folder.left_out is not None:
        say(folder.left_out)
    with Files(os.O_RDONLY) as files:
        try:
            return write_weights(
                destination,
                config,
                _weights(config, folder, files),
                lambda partial: copy_tokenizer(folder.path, partial / TOKENIZER),
            )
        except EOFError as error:
            raise DataError(f"{error}. Download or write it again.") from error


def write_weights(
    destination: str | Path, config: Config, weights: Iterable["SavedChunk"], complete: Callable[[Path], object]
) -> Path:
    """Write a checkpoint of iteration 0 that holds weights alone into the folder `destination`.

    Args:
        weights: chunks of all tensors, in the order in which they are written.
        complete: called with the unfinished checkpoint, for what belongs to it besides weights and configuration.
    Returns:
        The checkpoint's own folder.
    Raises:
        ConfigurationError: the destination has checkpoints.
        EOFError: a file ends before a weight that it should hold.
        OSError: the destination cannot be written.
    """
    if saved_iterations(destination):
        raise ConfigurationError(f"--save {destination} holds checkpoints already; give a new folder")
    partial = make_partial(destination, 0)
    try:
        metadata, written = _write_shard(partial / "__0_0.distcp", config, weights)
        (partial / ".metadata").write_bytes(metadata)
        (partial / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )
        (partial / CONFIG).write_text(to_yaml(config), encoding="utf-8")
        complete(partial)
        write_versions(partial)
        others = [path for path in checkpoint_manifest.all_files(partial) if path.name not in written]
        checkpoint_manifest.write(partial, written | checkpoint_manifest.describe(partial, others))
        return publish(destination, 0)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_tokenizer(source: Path, destination: Path, wanted: Sequence[str] = HUGGINGFACE_FILES) -> list[str]:
    """Copy those of the tokenizer's files that `source` has; returns their names."""
    names = [name for name in wanted if (source / name).exists()]
    if names:
        destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(safe_file(source, name), destination / name)
    return names


_STACKED = re.compile(r"decoder\.layers\.(\d+)\.(?:mlp\.experts\.(\d+)\.)?(.*)")


class Stacked(NamedTuple):
    """Where a checkpoint holds a parameter, or a state."""

    key: str
    indices: tuple[int, ...]
    """Indices of its layer, and of its expert, in the tensor of all: [layers, ...], [layers, experts, ...]."""

    sizes: tuple[int, ...]
    """Numbers of layers, and of experts, in that tensor."""


def stacked(config: Config, name: str) -> Stacked:
    """Return where a checkpoint holds a parameter: the experts of a layer are one tensor, and so are layers, unless
    they have different parameters."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return Stacked(name, (), ())
    layer, expert, rest = match.groups()
    indices, sizes, prefix = (int(layer),), (config.model.num_layers,), "decoder.layers."
    if stack(config).has_mixed_parameters:
        indices, sizes, prefix = (), (), f"decoder.layers.{layer}."
    if expert is None:
        return Stacked(f"{prefix}{rest}", indices, sizes)
    experts = config.model.num_experts or 0
    return Stacked(f"{prefix}mlp.experts.experts.{rest}", (*indices, int(expert)), (*sizes, experts))


def _weights(config: Config, folder: HFFolder, files: Files) -> Iterator["SavedChunk"]:
    """Yield the chunks of all weights, in the order in which they are written."""
    for mapping in state_dict_mapping(config, folder.family):
        key, indices, sizes = stacked(config, mapping.parameter.name)
        dtype = mapping.dtype or folder.dtype()
        rows, *rest = mapping.parameter.shape
        size = (*sizes, rows, *rest)
        row_bytes = WIDTH[dtype] * math.prod(rest)
        per_chunk = max(1, _CHUNK_BYTES // row_bytes)
        for start in range(0, rows, per_chunk):
            part = range(start, min(start + per_chunk, rows))
            offsets = (*indices, start, *(0 for _ in rest))
            sizes = (*(1 for _ in indices), len(part), *rest)
            elements = _elements(folder, mapping, part, dtype, files)
            yield SavedChunk(key, offsets, sizes, size, dtype, len(part) * row_bytes, elements)


class SavedChunk(NamedTuple):
    """A part of a tensor of a checkpoint, as it is written."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor_size: tuple[int, ...]
    dtype: str
    """As in safetensors."""

    length: int
    """Bytes of the elements."""

    elements: Iterable[FilePart]


def _write_shard(path: Path, config: Config, weights: Iterable[SavedChunk]) -> tuple[bytes, checkpoint_manifest.Files]:
    """Write the file of all weights and objects; returns the checkpoint's metadata, and the file's own entry."""
    parts, position = list[FilePart](), 0
    objects: dict[str, Chunk] = {}
    for key, value in _objects(config):
        content, _ = archive(pickle.dumps([value], protocol=2), None)
        objects[key] = Chunk((), (), path.name, position, len(content))
        parts.append(Literal(len(content), content))
        position += len(content)
    chunks: dict[tuple[str, tuple[int, ...], str], list[Chunk]] = {}
    for item in weights:
        head, tail = archive(tensor_pickle(item.sizes, item.dtype), item.length)
        parts += [Literal(len(head), head), *item.elements, Literal(len(tail), tail)]
        length = len(head) + item.length + len(tail)
        chunk = Chunk(item.offsets, item.sizes, path.name, position, length)
        chunks.setdefault((item.key, item.tensor_size, item.dtype), []).append(chunk)
        position += length
    size, checksum = gather(path, parts)
    assert size == position
    tensors = {key: Tensor(dtype, size, tuple(of_tensor)) for (key, size, dtype), of_tensor in chunks.items()}
    return torch_dist.write(tensors, objects), {path.name: {"bytes": size, "crc32": f"{checksum:08x}"}}


def _elements(folder: HFFolder, mapping: ParameterMapping, rows: range, dtype: str, files: Files) -> Iterator[FilePart]:
    """Yield the elements of these rows of a parameter; padding, which comes last, is zero."""
    width = WIDTH[dtype] * math.prod(mapping.parameter.shape[1:])
    covered = rows.start
    for span in mapping.ranges:
        low, high = max(span.start, rows.start), min(span.start + span.count, rows.stop)
        if low >= high:
            continue
        assert low == covered, f"{mapping.parameter.name}: its ranges are not in order"
        covered = high
        entry, first = folder.entries[span.tensor], span.tensor_start + low - span.start
        if mapping.is_copied and entry.dtype == dtype:
            yield FileRange((high - low) * width, files, entry.path, entry.offset_of(first))
            continue
        step = max(1, BLOCK // width)
        for start in range(first, first + high - low, step):
            part = range(start, min(start + step, first + high - low))
            yield ComputedBytes(len(part) * width, functools.partial(_convert, entry, mapping, part, dtype))
    if covered < rows.stop:
        yield Zeros((rows.stop - covered) * width)


def _convert(entry: Entry, mapping: ParameterMapping, rows: range, dtype: str, target: memoryview) -> None:
    """Fill `target` with rows of a parameter that lie there in another dtype, transposed or with other values."""
    import numpy as np

    from megatron_ext.checkpoint.huggingface.arrays import ARRAYS, converted

    part = entry.whole().T[rows.start : rows.stop] if mapping.transposed else entry.rows(rows.start, len(rows))
    values = np.frombuffer(target, ARRAYS[dtype]).reshape(part.shape)
    values[...] = converted(part, entry.dtype, dtype, mapping.added)


def _objects(config: Config) -> Iterator[tuple[str, Any]]:
    for state in states(config):
        if state.kind == "buffer":
            continue  # which lies with the weights
        key, indices, sizes = stacked(config, state.name)
        yield f"{key}/shard_{indices[0] if indices else 0}_{sizes[0] if sizes else 1}", None
    yield (
        "common_state/shard_0_1",
        {
            "weights_only": True,
            "iteration": 0,
            "content_metadata": {"distrib_optim_sharding_type": "fully_reshardable", "singleton_local_shards": False},
        },
    )
