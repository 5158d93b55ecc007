"""Imports a Hugging Face folder as a checkpoint that `--load` begins from: iteration 0, weights alone. One process does
it (`native/single_process.py`).
"""

import functools
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.dtypes import ARRAYS, WIDTH, converted
from megatron_ext.checkpoint.native.extra_files import HUGGINGFACE_FILES, TOKENIZER
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.checkpoint_tools.copying import BLOCK, ComputedBytes, FilePart, FileRange, Files, Zeros
from megatron_ext.plugins.checkpoint_tools.single_process import Item, items, write_checkpoint
from megatron_ext.plugins.families.state_dict_mapping import ParameterMapping, RowRange, state_dict_mapping
from megatron_ext.plugins.huggingface.forms import is_stored
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder, safe_file
from megatron_ext.plugins.huggingface.safetensors import Entry
from megatron_ext.rules.validate import problems
from megatron_ext.terminal import say, tracked


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
    _check_as_a_run(folder)
    folder.check(resolve(folder.values, Facts()))
    precision = {"BF16": "bf16", "F16": "fp16"}.get(folder.dtype())
    config = resolve({**folder.values, **({precision: True} if precision else {})}, Facts())
    for remark in folder.remarks:
        say(remark)
    with Files(os.O_RDONLY) as files:
        return write_checkpoint(
            destination,
            config,
            _weights(config, folder, files),
            {"weights_only": True, "iteration": 0},
            lambda partial: copy_tokenizer(folder.path, partial / TOKENIZER),
        )


_RUN: dict[str, Any] = {
    **{"mock_data": True, "device": "cpu", "micro_batch_size": 1, "train_iters": 1, "lr": 1e-3, "seq_length": 1},
    **{"attention_dropout": 0.0, "hidden_dropout": 0.0},
}
"""Flags of a run that need nothing of the model."""


def _check_as_a_run(folder: HFFolder) -> None:
    """Check the model by the rules of a run that begins from it, which would not start otherwise."""
    facts = Facts(huggingface=folder.values)
    if found := problems(resolve(_RUN, facts), facts):
        raise ConfigurationError([f"{folder.path}: {problem}" for problem in found])


def copy_tokenizer(source: Path, destination: Path, wanted: Sequence[str] = HUGGINGFACE_FILES) -> list[str]:
    """Copy the tokenizer's files that `source` has, and return their names."""
    names = [name for name in wanted if (source / name).exists()]
    if names:
        destination.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copyfile(safe_file(source, name), destination / name)
    return names


def _weights(config: Config, folder: HFFolder, files: Files) -> Iterator[Item]:
    for mapping in tracked("reading weights", list(state_dict_mapping(config, folder.family))):
        dtype = mapping.dtype or folder.dtype()
        yield from items(config, mapping.parameter, dtype, functools.partial(_elements, folder, mapping, dtype, files))


def _elements(folder: HFFolder, mapping: ParameterMapping, dtype: str, files: Files, rows: range) -> Iterator[FilePart]:
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
        if mapping.is_copied and entry.dtype == dtype and is_stored(entry):
            yield FileRange((high - low) * width, files, entry.path, entry.offset_of(first))
            continue
        step = max(1, BLOCK // width)
        for start in range(low, high, step):
            part = range(start, min(start + step, high))
            yield ComputedBytes(len(part) * width, functools.partial(_convert, entry, mapping, span, part, dtype))
    if covered < rows.stop:
        yield Zeros((rows.stop - covered) * width)


def _convert(
    entry: Entry, mapping: ParameterMapping, span: RowRange, rows: range, dtype: str, target: memoryview
) -> None:
    """Fill `target` with `rows` of a parameter whose bytes in the Hugging Face tensor cannot be copied: the tensor has
    another dtype, is transposed, is itself computed (`forms.ComputedEntry`), or `mapping.added` must be added to it.

    Args:
        entry: the Hugging Face tensor.
        span: the rows of the parameter that lie in this tensor; they include `rows`.
        dtype: safetensors' name of the dtype of `target`.
    """
    import numpy as np

    if mapping.transposed:
        part = mapping.transposed_rows(entry.whole(), span, rows.start, len(rows))
    else:
        part = entry.rows(span.tensor_start + rows.start - span.start, len(rows))
    values = np.frombuffer(target, ARRAYS[dtype]).reshape(part.shape)
    values[...] = converted(part, entry.dtype, dtype, mapping.added)
