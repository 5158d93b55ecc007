"""From a checkpoint to a Hugging Face folder: safetensors, `config.json`, tokenizer and model card.

One process without process groups. A saved chunk is read at a time, and its rows are written to their places in the
files, whatever layout saved it.
"""

import json
import pickle
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from megatron_ext.checkpoint import hf_safetensors, manifest
from megatron_ext.checkpoint.beside import TOKENIZER, kept_tokenizer
from megatron_ext.checkpoint.folder import CONFIG, find_latest
from megatron_ext.checkpoint.hf_import import copy_tokenizer, stack_sizes, stacked_key
from megatron_ext.checkpoint.hf_read import INDEX, SINGLE, run_rows
from megatron_ext.checkpoint.hf_safetensors import DTYPES, Entry
from megatron_ext.checkpoint.hf_stream import Buffer, read_saved_tensor
from megatron_ext.checkpoint.safe_reading import read_metadata
from megatron_ext.config.arguments import parse
from megatron_ext.config.families import Arranged, Family, arrangement, family_of
from megatron_ext.config.hf_config import hf_config
from megatron_ext.config.parameters import count
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.tokenizer.build import tokenizer_from_flags

_BLOCK_BYTES = 32 << 20


class SavedModel:
    """The weights and the configuration of a checkpoint, for one process that reads a piece at a time.

    Args:
        folder: a `--save` folder, whose latest checkpoint is taken, or one checkpoint in it.

    Raises:
        ConfigurationError: there is no checkpoint, or none with its `config.yaml`.
        DataError: it is damaged.
    """

    def __init__(self, folder: str | Path):
        self.path = _checkpoint(Path(folder))
        self._buffer = Buffer()
        self.config = _config(self.path)
        try:
            with (self.path / ".metadata").open("rb") as file:
                self.metadata = read_metadata(file)
        except (OSError, pickle.UnpicklingError) as error:
            raise DataError(f"{self.path}/.metadata cannot be read: {error}. Take an earlier checkpoint.") from error

    def check(self) -> None:
        """Whether every parameter of the configuration is there.

        Raises:
            DataError: naming every tensor that is missing or has another shape.
        """
        problems = []
        for arranged in arrangement(self.config, family_of(self.config)):
            parameter = arranged.parameter
            key, place = stacked_key(parameter.name)
            expected = (*stack_sizes(self.config, place), *parameter.shape)
            entry = self.metadata.state_dict_metadata.get(key)
            if not isinstance(entry, TensorStorageMetadata):
                problems.append(f"{key} is missing; it should have shape {list(expected)}")
            elif tuple(entry.size) != expected:
                problems.append(f"{key} has shape {list(entry.size)}; by {CONFIG} it should be {list(expected)}")
        if problems:
            problems = list(dict.fromkeys(problems))
            raise DataError(f"{self.path} does not match its {CONFIG}: {'; '.join(problems)}")

    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        entry = self.metadata.state_dict_metadata["embedding.word_embeddings.weight"]
        assert isinstance(entry, TensorStorageMetadata)
        return entry.properties.dtype

    def pieces(self, name: str) -> Iterator[tuple[int, int, torch.Tensor]]:
        """The saved pieces of a parameter: first row, first column, [rows, columns] (a vector: [rows])."""
        key, place = stacked_key(name)
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks:
            inside = [index - start for index, start in zip(place, chunk.offsets, strict=False)]
            if all(0 <= index < size for index, size in zip(inside, chunk.sizes, strict=False)):
                row, *column = chunk.offsets[len(place) :]
                yield row, column[0] if column else 0, self._read(key, chunk)[tuple(inside)]

    def _read(self, key: str, chunk: ChunkStorageMetadata) -> torch.Tensor:
        """A saved chunk, until the next one is read."""
        place = self.metadata.storage_data[MetadataIndex(key, chunk.offsets)]
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)
        path = self.path / place.relative_path
        try:
            with path.open("rb") as file:
                return read_saved_tensor(
                    file, place.offset, place.length, tuple(chunk.sizes), entry.properties.dtype, self._buffer
                )
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise DataError(f"{path}: {key} cannot be read: {error}. Take an earlier checkpoint.") from error

    def damage(self) -> list[str]:
        """What is not as the manifest says; nothing, where there is none."""
        try:
            files = manifest.read(self.path)
        except ValueError as error:
            return [str(error)]
        return manifest.problems(self.path, files or {})


@dataclass(frozen=True)
class Exported:
    path: Path
    family: Family
    size: int
    """Bytes of the weights."""
    files: int
    tokenizer: list[str]
    """Names of the tokenizer's files that were copied."""


def export_huggingface(
    source: SavedModel,
    destination: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_size: int = 5 * 10**9,
) -> Exported:
    """Write the folder `destination`, which must not exist or be empty.

    Args:
        dtype: of the weights written; default the checkpoint's.
        max_shard_size: bytes of one safetensors file; a larger tensor gets a file of its own.
    Raises:
        ConfigurationError: no family has the model's shape, or the destination is not empty.
        DataError: the checkpoint is damaged.
        OSError: the destination cannot be written.
    """
    final = Path(destination)
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ConfigurationError(f"--save {final} exists and is not an empty folder; give a new one")
    family = family_of(source.config)
    source.check()
    code = {kind: code for code, kind in DTYPES.items()}[dtype or source.dtype()]
    partial = final.with_name(f".{final.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    executor = ThreadPoolExecutor(1)
    damage = executor.submit(source.damage)  # beside the conversion: it reads everything, too
    try:
        arranged = arrangement(source.config, family)
        shapes = {name: shape for part in arranged for name, shape in part.tensor_shapes().items()}
        entries = _files(partial, shapes, code, max_shard_size)
        for part in arranged:
            for row, column, tensor in source.pieces(part.parameter.name):
                _write(entries, part, row, column, tensor)
        tokenizer = _write_beside(partial, source, family, code)
        if problems := damage.result():
            raise DataError(f"{source.path} is damaged ({', '.join(problems[:5])}). Take an earlier checkpoint.")
        if final.exists():
            final.rmdir()
        partial.rename(final)
    finally:
        executor.shutdown()
        shutil.rmtree(partial, ignore_errors=True)
    size = sum(torch.Size(shape).numel() for shape in shapes.values()) * DTYPES[code].itemsize
    return Exported(final, family, size, len({entry.path for entry in entries.values()}), tokenizer)


def _checkpoint(folder: Path) -> Path:
    if (folder / ".metadata").exists():
        return folder
    found = find_latest(folder)
    if found is None:
        raise ConfigurationError(f"--load {folder} holds no checkpoint; name a folder that --save wrote")
    return found.path


def _config(path: Path) -> Config:
    if not (path / CONFIG).exists():
        raise ConfigurationError(f"{path} has no {CONFIG}, which says what model it holds; resume and save it once")
    values = parse(["--config", str(path / CONFIG)]).values
    return resolve({**values, **kept_tokenizer(values, path)}, Facts())


def _files(folder: Path, shapes: Mapping[str, tuple[int, ...]], code: str, max_size: int) -> dict[str, Entry]:
    """Make the safetensors files, and the index where there are several."""
    itemsize = DTYPES[code].itemsize
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = total = 0
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * itemsize
        if groups[-1] and filled + size > max_size:
            groups.append({})
            filled = 0
        groups[-1][name] = shape
        filled += size
        total += size
    names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    names = [SINGLE] if len(groups) == 1 else names
    entries = {}
    for name, group in zip(names, groups, strict=True):
        entries |= hf_safetensors.create(folder / name, group, code)
    if len(groups) > 1:
        weight_map = {name: entry.path.name for name, entry in sorted(entries.items())}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return entries


def _write(entries: Mapping[str, Entry], arranged: Arranged, row: int, column: int, tensor: torch.Tensor) -> None:
    """Put a piece of a parameter, whose first element is at (row, column), into the files."""
    block = max(1, _BLOCK_BYTES // (tensor[0].numel() * tensor.element_size()))
    for run in arranged.runs:
        stop = min(run.start + run.count, row + tensor.size(0))
        for low in range(max(run.start, row), stop, block):
            part = tensor[low - row : min(low + block, stop) - row]
            entry, first = entries[run.tensor], run.tensor_start + low - run.start
            if not arranged.transposed and part.shape[1:] == entry.shape[1:]:
                entry.write_rows(first, part)
                continue
            target = run_rows(entry, arranged, first, part.size(0), writable=True)
            target[:, column : column + part.size(1)].copy_(part)


def _write_beside(folder: Path, source: SavedModel, family: Family, code: str) -> list[str]:
    """Everything but the weights; returns the names of the tokenizer's files."""
    names = []
    for origin in _tokenizer_folders(source):
        names = copy_tokenizer(origin, folder)
        if names:
            break
    generation = (
        json.loads((folder / "generation_config.json").read_bytes()) if "generation_config.json" in names else {}
    )
    if not generation:
        generation = {"bos_token_id": None, "eos_token_id": _end_of_document(source.config)}
        _write_json(folder / "generation_config.json", generation)
    content = hf_config(source.config, family, str(DTYPES[code]).removeprefix("torch."))
    content |= {name: generation.get(name) for name in ("bos_token_id", "eos_token_id")}
    _write_json(folder / "config.json", content)
    (folder / "README.md").write_text(_model_card(source, family, code), encoding="utf-8")
    return [name for name in names if name != "generation_config.json"]


def _tokenizer_folders(source: SavedModel) -> Iterator[Path]:
    yield source.path / TOKENIZER
    model = source.config.data.tokenizer_model
    if model is not None:
        yield Path(model) if Path(model).is_dir() else Path(model).parent


def _end_of_document(config: Config) -> int | None:
    data = config.data
    if data.tokenizer_type in (None, "NullTokenizer"):
        return None
    try:
        return tokenizer_from_flags(data).eod
    except ConfigurationError:
        return None  # its files are no longer there


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _model_card(source: SavedModel, family: Family, code: str) -> str:
    model = source.config.model
    heads = f"{model.num_attention_heads}, {model.num_key_value_heads}, {model.kv_channels}"
    experts = ""
    if model.num_experts is not None:
        experts = f"| experts, of them for each token, width | {model.num_experts}, {model.moe_router_topk}, "
        experts += f"{model.expert_ffn_hidden_size} |\n"
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
---

# {family.architecture}, {count(source.config) / 1e6:,.1f}M parameters

Exported from the training checkpoint `{source.path.name}` by `tools/convert_checkpoint.py to-hf`.

| | |
|---|---|
| layers, hidden size, MLP width | {model.num_layers}, {model.hidden_size}, {model.ffn_hidden_size} |
{experts}| heads, key/value heads, head size | {heads} |
| vocabulary | {source.config.data.vocab_size} |
| trained with sequences of | {model.seq_length or "unknown"} tokens |
| weights | {code} |

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
"""
