"""Exports a checkpoint to a Hugging Face folder: safetensors, `config.json`, tokenizer and model card.

One process does it, without process groups and without torch. Every shard is read once from its beginning to its end,
its rows are written to their places in the files, whatever layout saved it, and its checksum is compared with the
manifest.
"""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megatron_ext.checkpoint.dtypes import ARRAYS, DTYPES, WIDTH, converted
from megatron_ext.checkpoint.native.extra_files import HUGGINGFACE_FILES, TOKENIZER, tokenizer_files
from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.schema import Config, flags_of
from megatron_ext.durable import replace_text, sync
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.parts.catalogue import count
from megatron_ext.plugins.checkpoint_tools.copying import (
    BLOCK,
    ComputedBytes,
    FilePart,
    FileRange,
    Files,
    SkippedBytes,
    scatter,
    write_all,
)
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.flags import FamilyFlags
from megatron_ext.plugins.families.hf_config import hf_config, unsaid_dropouts
from megatron_ext.plugins.families.registry import FAMILIES, obstacles
from megatron_ext.plugins.families.state_dict_mapping import ParameterMapping, RowRange, copies, state_dict_mapping
from megatron_ext.plugins.huggingface import safetensors as hf_safetensors
from megatron_ext.plugins.huggingface.forms import is_stored
from megatron_ext.plugins.huggingface.huggingface_folder import INDEX, SINGLE, vectors_as_rows
from megatron_ext.plugins.huggingface.importer import copy_tokenizer
from megatron_ext.plugins.huggingface.safetensors import Entry
from megatron_ext.plugins.huggingface.saved_model import Piece, SavedModel
from megatron_ext.plugins.pages.markup import code, table
from megatron_ext.terminal import tracked, warn
from megatron_ext.tokenizer.from_flags import build_tokenizer, tokenizer_from_flags
from megatron_ext.tokenizer.tokenizer_protocol import Tokenizer
from megatron_ext.untrusted.text import load_json, read_file

if TYPE_CHECKING:
    import numpy.typing as npt


@dataclass(frozen=True)
class Exported:
    """Reports what was exported."""

    path: Path
    family: Family
    size: int
    """Size of the weights in bytes."""
    files: int
    tokenizer: list[str]
    """Names of the tokenizer's files; none where it was left out or is not at hand."""


def export_huggingface(
    source: SavedModel,
    destination: str | Path,
    *,
    dtype: str | None = None,
    max_shard_size: int = 5 * 10**9,
    with_tokenizer: bool = True,
    check_tokenizer: Callable[[Path, Config, Tokenizer], object] | None = None,
) -> Exported:
    """Write the folder `destination`, which must not exist or be empty.

    Args:
        dtype: dtype of the weights written, as in safetensors; default the checkpoint's.
        max_shard_size: largest size of one safetensors file in bytes; a larger tensor gets a file of its own.
        with_tokenizer: whether to write the tokenizer's files.
        check_tokenizer: called, before any weights are written, with the folder of the tokenizer's files, the run's
            configuration and the tokenizer of training; what it raises ends the export. See
            megatron_ext.plugins.huggingface.exported_tokenizer.
    Raises:
        ConfigurationError: no family has the model's shape, the destination is not empty, or the tokenizer cannot be
            written as tokenizer.json.
        DataError: the checkpoint is damaged.
        OSError: the destination cannot be written.
    """
    family, config = source.written
    source.check()
    _warn_of_another_type(config, family)
    if config.model.mtp_num_layers != source.config.model.mtp_num_layers:
        of_one = " that share a layer" if source.config.model.mtp_use_repeated_layer else ""
        warn(
            f"{family.model_type} has no depths of multi-token prediction{of_one}: those of --mtp-num-layers "
            f"{source.config.model.mtp_num_layers} are left out, and the layers before them are exported"
        )
    code = dtype or source.dtype()
    with new_folder(Path(destination)) as unfinished:
        mappings = state_dict_mapping(config, family)
        shapes = {name: shape for part in mappings for name, shape in part.tensor_shapes().items()}
        constants = family.constants_of(config)
        repeated = copies(config, family)
        shapes |= {copy: shapes[original] for copy, original in repeated.items()}
        shapes |= dict.fromkeys(constants, ())
        dtypes = {name: part.dtype for part in mappings for name in part.tensor_shapes() if part.dtype is not None}
        vectors = family.vectors or "\0"
        shapes = {name: shape[1:] if vectors in name else shape for name, shape in shapes.items()}
        entries = vectors_as_rows(_files(unfinished, shapes, code, max_shard_size, dtypes), family)
        tokenizer = _tokenizer_of_training(source.config)
        copied = _copy(source, unfinished, HUGGINGFACE_FILES if with_tokenizer else (_GENERATION,))
        names = [name for name in copied if name != _GENERATION]
        if with_tokenizer and tokenizer is not None and _is_converted(source.config):
            from megatron_ext.plugins.huggingface.tokenizer_files import write_tokenizer  # imports numpy

            names = sorted({*names, *write_tokenizer(tokenizer, unfinished)})
        _write_companions(unfinished, source, family, code, tokenizer)
        compared = tokenizer or _kept_tokenizer(source)
        if names and compared is not None and check_tokenizer is not None:
            check_tokenizer(unfinished, source.config, compared)
        write_tensors(source, mappings, entries, repeated)
        for name, value in constants.items():
            entries[name].set_number(value)
    return exported(Path(destination), family, entries, names)


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `final` on exit, and is removed where something goes wrong."""
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise ConfigurationError(f"--save {final} exists and is not an empty folder; give a new one")
    unfinished = final.with_name(f".{final.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for path in (*unfinished.iterdir(), unfinished):
            sync(path)
        if final.exists():
            final.rmdir()
        unfinished.rename(final)
        sync(final.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def exported(path: Path, family: Family, entries: Mapping[str, Entry], tokenizer: list[str]) -> Exported:
    """Return the report of a folder whose tensors are `entries`."""
    size = sum(math.prod(entry.shape) * WIDTH[entry.dtype] for entry in entries.values())
    return Exported(path, family, size, len({entry.path for entry in entries.values()}), tokenizer)


def write_tensors(
    source: SavedModel, mappings: list[ParameterMapping], entries: Mapping[str, Entry], repeated: Mapping[str, str]
) -> None:
    """Write the checkpoint's weights to their places.

    Args:
        entries: the places, by the names of `mappings`.
        repeated: tensors that repeat another one -> the other one.
    Raises:
        DataError: the shards are not what the manifest says.
    """
    with Files(os.O_WRONLY) as files:
        _write_weights(source, mappings, entries, files)
        for copy, original in repeated.items():
            bits = memoryview(entries[original].whole()).cast("B")
            write_all(files[entries[copy].path], entries[copy].offset, bits)


def _write_weights(
    source: SavedModel, mappings: list[ParameterMapping], entries: Mapping[str, Entry], files: Files
) -> None:
    """Copy the checkpoint's shards with their checksums, all of them where it has a manifest.

    Raises:
        DataError: the shards are not what the manifest says.
    """
    shards, problems = source.damage()
    parts: dict[str, list[tuple[int, FilePart]]] = {name: [] for name in shards}
    for one in mappings:
        dtype = source.dtype(one.parameter.name)
        for piece in source.pieces(one.parameter.name):
            ranges = _parts(piece, one, entries, dtype, files)
            parts.setdefault(piece.file, []).extend(ranges)
    for name, wanted in tracked("copying shards", list(parts.items())):
        path, expected = source.path / name, shards.get(name)
        try:
            size, checksum = scatter(path, _all(wanted, path), checksum=expected is not None)
        except (EOFError, FileNotFoundError) as error:
            raise DataError(f"{source.path} is damaged ({error}). Take an earlier checkpoint.") from error
        if expected is not None and size != expected["bytes"]:
            problems.append(f"{name} has {size} bytes instead of {expected['bytes']}")
        elif expected is not None and f"{checksum:08x}" != expected["crc32"]:
            problems.append(f"{name} has another checksum than {expected['crc32']}")
    if problems:
        raise DataError(f"{source.path} is damaged ({', '.join(problems[:5])}). Take an earlier checkpoint.")


def _all(wanted: list[tuple[int, FilePart]], path: Path) -> Iterator[FilePart]:
    """Yield the whole file: the wanted parts, and what lies between them."""
    position = 0
    for offset, part in sorted(wanted, key=lambda pair: pair[0]):
        if offset < position:
            raise DataError(f"{path}: two tensors overlap at {offset}. Take an earlier checkpoint.")
        if offset > position:
            yield SkippedBytes(offset - position)
        yield part
        position = offset + part.length
    rest = path.stat().st_size - position
    if rest < 0:
        raise EOFError(f"{path} ends {-rest} bytes too early")
    if rest:
        yield SkippedBytes(rest)


def _parts(
    piece: Piece, mapping: ParameterMapping, entries: Mapping[str, Entry], dtype: str, files: Files
) -> Iterator[tuple[int, FilePart]]:
    """Yield where in the shard which rows of a piece lie, and where they belong; padding of the vocabulary is left
    out."""
    rows, *columns = piece.shape
    width = WIDTH[dtype] * math.prod(columns)
    for span in mapping.ranges:
        low, high = max(span.start, piece.row), min(span.start + span.count, piece.row + rows)
        entry, shift = entries[span.tensor], span.tensor_start - span.start
        if low >= high:
            continue
        if piece.array is not None:
            target = _Target(entry, mapping, span, low, piece.column, files)
            target.put(piece.array[low - piece.row : high - piece.row], dtype)
            continue
        offset = piece.offset + (low - piece.row) * width
        if mapping.is_copied and entry.dtype == dtype and tuple(columns) == entry.columns and is_stored(entry):
            yield offset, FileRange((high - low) * width, files, entry.path, entry.offset_of(low + shift))
            continue
        step = max(1, BLOCK // width)
        for start in range(low, high, step):
            target = _Target(entry, mapping, span, start, piece.column, files)
            shape = (min(step, high - start), *columns)
            part = ComputedBytes(shape[0] * width, partial(target.put_bytes, shape=shape, dtype=dtype))
            yield offset + (start - low) * width, part


@dataclass(frozen=True)
class _Target:
    """The place of rows of a parameter that cannot be copied as they are."""

    entry: Entry
    mapping: ParameterMapping
    span: RowRange
    row: int
    """Index of the first row in the parameter."""

    column: int
    files: Files

    def put_bytes(self, source: memoryview, shape: tuple[int, ...], dtype: str) -> None:
        import numpy as np

        self.put(np.frombuffer(source, ARRAYS[dtype]).reshape(shape), dtype)

    def put(self, values: "npt.NDArray", dtype: str) -> None:
        import numpy as np

        rows, columns = values.shape[0], slice(self.column, self.column + math.prod(values.shape[1:]))
        values = converted(values, dtype, self.entry.dtype, -self.mapping.added)
        row = self.span.tensor_start + self.row - self.span.start
        if self.mapping.transposed:
            whole = self.entry.whole(writable=True)
            self.mapping.transposed_rows(whole, self.span, self.row, rows)[:, columns] = values.reshape(rows, -1)
        elif values.shape[1:] == self.entry.columns and is_stored(self.entry):
            bits = memoryview(np.ascontiguousarray(values)).cast("B")
            write_all(self.files[self.entry.path], self.entry.offset_of(row), bits)
        else:
            self.entry.rows(row, rows, writable=True)[:, columns] = values.reshape(rows, -1)


def _files(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    code: str,
    max_size: int,
    dtypes: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Entry]:
    """Make the safetensors files, and the index where there are several; `dtypes`: tensors whose dtype differs from
    `code`."""
    groups: list[dict[str, tuple[int, ...]]] = [{}]
    filled = total = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * WIDTH[dtypes.get(name, code)]
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
        entries |= hf_safetensors.create(folder / name, group, code, dtypes)
    if len(groups) > 1:
        weight_map = {name: entry.path.name for name, entry in sorted(entries.items())}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return entries


_GENERATION = "generation_config.json"


def _write_companions(folder: Path, source: SavedModel, family: Family, code: str, tokenizer: Tokenizer | None) -> None:
    """Write everything but the weights and the tokenizer."""
    path = folder / _GENERATION
    generation = _generation(path) if path.exists() else {}
    named, end = generation.get("eos_token_id"), None if tokenizer is None else tokenizer.eod
    others = named if isinstance(named, list) else [] if named is None else [named]
    main = named if end is None or end in others else end
    if main != named or named is None:  # without it no server would end a text
        generation = {"bos_token_id": None, **generation, "eos_token_id": [end, *others] if others else end}
        _write_json(path, generation)
    if main != named and others:
        warn(
            f"documents ended with id {end} in training, and {_GENERATION} next to the tokenizer names "
            f"{', '.join(map(str, others))}: config.json says {end}, {_GENERATION} all of them; take out of the latter "
            "what must not end a text"
        )
    content = hf_config(source.written[1], family, DTYPES[code])
    content |= {"bos_token_id": generation.get("bos_token_id"), "eos_token_id": main}
    _write_json(folder / "config.json", content)
    for name, rate in unsaid_dropouts(folder, source.config.model):
        warn(
            f"trained with {flag_of(name)} {rate:g}, for which config.json of {family.model_type} has no key: give the "
            "flag to go on with it from this folder"
        )
    replace_text(folder / "README.md", _model_card(source, family, code))


def _warn_of_another_type(config: Config, family: Family) -> None:
    """Warn where the model does not have the shape of the type that it began from or that was asked for."""
    named = flags_of(config.checkpoint, FamilyFlags).hf_model_type
    known = FAMILIES.get(named or "")
    if named is None or known is family:
        return
    why = "this version does not write it" if known is None else f"it has {', '.join(obstacles(config, known))}"
    warn(f"the model is exported as {family.model_type}, and not by --hf-model-type {named}: {why}")


def _copy(source: SavedModel, folder: Path, names: Sequence[str]) -> list[str]:
    """Copy the tokenizer's files that have these names, and return the names of the copied files."""
    data = source.config.data
    if data.tokenizer_type not in (None, "HuggingFaceTokenizer"):
        files = {name: path for name, path in tokenizer_files(data).items() if name in names and path.is_file()}
        for name, path in files.items():
            shutil.copyfile(path, folder / name)
        return list(files)
    for origin in (source.path / TOKENIZER, *([Path(data.tokenizer_model)] if data.tokenizer_model else ())):
        if files := copy_tokenizer(origin, folder, names):
            return files
    return []


def _generation(path: Path) -> dict[str, Any]:
    try:
        content = load_json(read_file(path, 1 << 20))
    except ValueError as error:
        raise DataError(f"generation_config.json beside the tokenizer cannot be read: {error}; remove it") from None
    if not isinstance(content, dict):
        raise DataError("generation_config.json beside the tokenizer is no JSON object; remove it")
    return content


def _is_converted(config: Config) -> bool:
    """Return whether the files are made from the tokenizer; a Hugging Face folder is copied as it is."""
    data = config.data
    return data.tokenizer_type != "HuggingFaceTokenizer" or data.tokenizer_special_tokens is not None


def _tokenizer_of_training(config: Config) -> Tokenizer | None:
    """Return the tokenizer of the training; None where the configuration names none with a text, or where its files are
    gone."""
    if config.data.tokenizer_type in (None, "NullTokenizer"):
        return None
    try:
        return tokenizer_from_flags(config.data)
    except ConfigurationError:
        return None


def _kept_tokenizer(source: SavedModel) -> Tokenizer | None:
    """Return the tokenizer of the folder that was imported, where no run has named another; None if it has none."""
    if source.config.data.tokenizer_type is not None:
        return None
    try:
        return build_tokenizer("HuggingFaceTokenizer", str(source.path / TOKENIZER))
    except ConfigurationError:
        return None


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(content, indent=2) + "\n")


def _model_card(source: SavedModel, family: Family, weights: str) -> str:
    model = source.config.model
    rows = [["layers, hidden size, MLP width", model.num_layers, model.hidden_size, model.ffn_hidden_size]]
    if model.num_experts is not None:
        experts = (model.num_experts, model.moe_router_topk, model.expert_ffn_hidden_size)
        rows.append(["experts, of them for each token, width", *experts])
    rows += [
        ["heads, key/value heads, head size", model.num_attention_heads, model.num_key_value_heads, model.kv_channels],
        ["vocabulary", source.config.data.vocab_size],
        ["trained with sequences of", f"{model.seq_length or 'unknown'} tokens"],
        ["weights", weights],
    ]
    described = "\n".join(table(["", ""], ([str(name), ", ".join(map(str, values))] for name, *values in rows)))
    return f"""\
---
library_name: transformers
pipeline_tag: text-generation
---

# {family.architecture}, {count(source.written[1]) / 1e6:,.1f}M parameters

Exported from the training checkpoint {code(source.path.name)} by `megatron-ext convert to-hf`.

{described}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")
tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")
```
"""
