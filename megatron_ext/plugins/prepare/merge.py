"""Merges several .bin/.idx pairs into one, byte for byte what Megatron-LM's tools/merge_datasets.py writes."""

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from megatron_ext.data.data_manifest import MadeWith, checksums, made_with, read_manifest
from megatron_ext.data.indexed import HEADER, MAGIC, VERSION
from megatron_ext.data.integrity import IndexArrays, check_indexed_files, open_index, token_count
from megatron_ext.data.mask import Mask, copy_flags, mask_path
from megatron_ext.durable import check_space, naming, only_files, sync, sync_file
from megatron_ext.errors import ConfigurationError, DataError
from megatron_ext.plugins.prepare.journal import write_manifest
from megatron_ext.tokenizer.tokenizer_record import describe_tokenizer, same_tokenizer

_BLOCK = 1 << 20  # entries copied at a time


@dataclass(frozen=True)
class Merged:
    """Totals of the merged pair."""

    documents: int
    sequences: int
    token_bytes: int


def find_prefixes(folder: str) -> list[str]:
    """Return the pairs in a folder, by name; a sole .bin or .idx is an error.

    Raises:
        ConfigurationError: `folder` is no folder, holds no pair, or half of one.
    """
    if not Path(folder).is_dir():
        raise ConfigurationError(f"--input {folder} is not a folder; give the folder of the .bin and .idx files")
    names = sorted(path.stem for path in Path(folder).iterdir() if path.suffix in (".bin", ".idx"))
    prefixes = list(dict.fromkeys(names))
    if not prefixes:
        raise ConfigurationError(f"--input {folder} holds no .bin and .idx files")
    alone = [name for name in prefixes if names.count(name) == 1]
    if alone:
        raise ConfigurationError(f"--input {folder}: {alone[0]} has only one of its .bin and .idx files; copy both")
    return [str(Path(folder) / name) for name in prefixes]


def merge_indexed_files(prefixes: Sequence[str], output: str, *, accept_other_tokenizer: bool = False) -> Merged:
    """Write the documents of all pairs, in this order, as one pair. Memory does not grow with the data.

    Where the manifests of all inputs name the same tokenizer, `<output>_manifest.json` names it too.

    Raises:
        ConfigurationError: a file is missing, or the output is one of the inputs.
        DataError: a pair is damaged, the tokens of two have different types, or (unless that is accepted) the
            manifests of two name different tokenizers; or some have a mask and some have none.
    """
    for prefix in prefixes:
        if Path(prefix).resolve() == Path(output).resolve():
            raise ConfigurationError(f"--output-prefix {output} is among the inputs; choose another name")
        check_indexed_files(prefix)
    parts = [open_index(prefix) for prefix in prefixes]
    for prefix, part in zip(prefixes, parts, strict=True):
        if part.dtype != parts[0].dtype:
            raise DataError(
                f"{prefix} holds {part.dtype} tokens, {prefixes[0]} {parts[0].dtype}: they were made with different "
                "vocabularies; preprocess both with one tokenizer"
            )
    makers = [made_with(prefix) for prefix in prefixes]
    if not accept_other_tokenizer:
        _check_one_tokenizer(prefixes, makers)
    sequences = sum(len(part.lengths) for part in parts)
    documents = sum(len(part.document_indices) - 1 for part in parts)
    packed_to = _packing_of_masks(prefixes)
    bin_partial, idx_partial = Path(f"{output}.bin.partial"), Path(f"{output}.idx.partial")
    mask_partial = Path(f"{output}.mask.partial")
    try:
        check_space(bin_partial, sum(os.path.getsize(f"{prefix}.bin") for prefix in prefixes))
        with naming(bin_partial), open(bin_partial, "wb", opener=only_files) as out:
            for prefix in prefixes:
                with open(f"{prefix}.bin", "rb") as source:
                    shutil.copyfileobj(source, out, 1 << 22)
            token_bytes = out.tell()
            sync_file(out)
        with naming(idx_partial), open(idx_partial, "wb", opener=only_files) as out:
            out.write(HEADER.pack(MAGIC, VERSION, parts[0].code, sequences, documents + 1))
            for block in _index_blocks(parts):
                out.write(block.data)
            sync_file(out)
        if packed_to is not None:
            with naming(mask_partial), open(mask_partial, "wb", opener=only_files) as out:
                copy_flags(prefixes, packed_to, out)
                sync_file(out)
        Path(f"{output}.idx").unlink(missing_ok=True)
        mask_path(output).unlink(missing_ok=True)
        os.replace(bin_partial, f"{output}.bin")
        if packed_to is not None:
            os.replace(mask_partial, mask_path(output))
        os.replace(idx_partial, f"{output}.idx")
    except BaseException:
        bin_partial.unlink(missing_ok=True)
        idx_partial.unlink(missing_ok=True)
        mask_partial.unlink(missing_ok=True)
        raise
    merged = Merged(documents, sequences, token_bytes)
    _write_manifest(prefixes, makers, output, merged)
    sync(Path(output).parent)
    return merged


def _packing_of_masks(prefixes: Sequence[str]) -> int | None:
    """Return the sequence length that all pairs were packed to, 0 where they differ; None where no pair has a mask."""
    with_mask = [prefix for prefix in prefixes if mask_path(prefix).exists()]
    if not with_mask:
        return None
    without = [prefix for prefix in prefixes if prefix not in with_mask]
    if without:
        raise DataError(
            f"{with_mask[0]} has a mask of what is trained on, {without[0]} has none: preprocess that one with "
            "--data-format completion, which masks nothing, or move the masks away"
        )
    masks = [Mask(prefix, token_count(prefix)) for prefix in prefixes]
    lengths = {mask.packed_to for mask in masks}
    return lengths.pop() if len(lengths) == 1 else 0


def _check_one_tokenizer(prefixes: Sequence[str], makers: Sequence[MadeWith | None]) -> None:
    known = [(prefix, made.tokenizer) for prefix, made in zip(prefixes, makers, strict=True) if made is not None]
    for prefix, tokenizer in known:
        first, other = known[0]
        if not same_tokenizer(tokenizer, other):
            raise DataError(
                f"{prefix} was made with {describe_tokenizer(tokenizer)}, {first} with {describe_tokenizer(other)}: "
                "the same ids are other text; preprocess both with one tokenizer, or add --accept-other-tokenizer"
            )


def _write_manifest(prefixes: Sequence[str], makers: Sequence[MadeWith | None], output: str, merged: Merged) -> None:
    """Say which tokenizer made the merged pair, if one made all of it."""
    path = Path(f"{output}_manifest.json")
    existing = read_manifest(path)
    if existing is not None and "merged" not in existing:
        return  # of preprocess, for a pair of a longer name
    known = [made.tokenizer for made in makers if made is not None]
    if len(known) < len(makers) or not all(same_tokenizer(made, known[0]) for made in known):
        path.unlink(missing_ok=True)
        return
    content = {"merged": list(prefixes), "tokenizer": dict(known[0]), "outputs": {output: asdict(merged)}}
    write_manifest(path, {**content, "checksums": checksums([output])})


def _index_blocks(parts: Sequence[IndexArrays]) -> Iterator[np.ndarray]:
    """Yield the three arrays of the merged index, one after another: lengths, pointers and document indices. The latter
    two count from the beginning of the merged pair, past the parts before."""
    for part in parts:
        yield from _blocks(part.lengths)
    shift = 0
    for part in parts:
        yield from (block + shift for block in _blocks(part.pointers))
        shift += int(part.pointers[-1]) + int(part.lengths[-1]) * part.dtype.itemsize
    yield np.zeros(1, "<i8")
    shift = 0
    for part in parts:
        yield from (block + shift for block in _blocks(part.document_indices[1:]))
        shift += len(part.lengths)


def _blocks(array: np.ndarray) -> Iterator[np.ndarray]:
    return (np.ascontiguousarray(array[first : first + _BLOCK]) for first in range(0, len(array), _BLOCK))
