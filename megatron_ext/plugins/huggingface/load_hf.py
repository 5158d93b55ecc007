"""`--load-hf` begins from the weights of a Hugging Face folder, each rank from its own slices."""

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_ext.checkpoint.dtypes import DTYPES
from megatron_ext.checkpoint.native.snapshot import Saveable
from megatron_ext.errors import DataError
from megatron_ext.model.names import biases_of_experts, by_expert, global_named_parameters
from megatron_ext.parallel.groups import tensor_group
from megatron_ext.parallel.rows import row_shard
from megatron_ext.parts import slices
from megatron_ext.plugins.checkpoint_tools.copying import read_exactly
from megatron_ext.plugins.families.state_dict_mapping import ParameterMapping, state_dict_mapping
from megatron_ext.plugins.huggingface.forms import is_stored
from megatron_ext.plugins.huggingface.huggingface_folder import HFFolder
from megatron_ext.plugins.huggingface.safetensors import Entry


def load_huggingface(run: Saveable, path: str | Path) -> list[str]:
    """Put the weights into the run's model, rounded to its dtype, and unrounded into the optimizer's fp32 masters.

    Returns:
        Sentences on contents of the folder that are not read (`HFFolder.remarks`).
    Raises:
        ConfigurationError: the folder cannot be read as a model of ours.
        DataError: the folder's tensors are not those that its `config.json` describes.
    """
    folder = HFFolder(path)
    folder.check(run.config)
    mappings = {part.parameter.name: part for part in state_dict_mapping(run.config, folder.family)}
    with torch.no_grad():
        for name, weight in global_named_parameters(run.chunks):
            shard = row_shard(weight)
            whole = weight.data if shard is None else torch.empty(shard.shape, dtype=shard.local.dtype)
            _read_weight(run, folder, mappings, name, whole)
            if shard is not None:
                shard.local.copy_(whole[shard.first : shard.stop])  # a master itself, of which the weight is made
        for name, bias in biases_of_experts(run.chunks):
            read_shard(folder, mappings[name], bias, 0, 1)
        run.sharding.reload_masters(run.optimizer)
        _read_masters(run, folder, mappings)
    return folder.remarks


def _read_weight(
    run: Saveable, folder: HFFolder, mappings: Mapping[str, ParameterMapping], name: str, whole: torch.Tensor
) -> None:
    """Fill `whole`, which has the shape of the weight on this tensor-parallel rank."""
    for inner, tensor in by_expert(name, whole):
        group = tensor_group(run.groups, expert=mappings[inner].parameter.expert is not None)
        read_shard(folder, mappings[inner], tensor, group.rank(), group.size())


def _read_masters(run: Saveable, folder: HFFolder, mappings: Mapping[str, ParameterMapping]) -> None:
    """Read the fp32 masters of 16-bit weights that were rounded; the others have been made from their weights."""
    names = {id(weight): name for name, weight in global_named_parameters(run.chunks)}
    for part in run.sharding.parts(run.optimizer):
        for weight, main in part.main_parameters():
            if row_shard(weight) is not None or not part.saves_master(weight):
                continue
            name, whole = names[id(weight)], torch.empty(weight.shape, dtype=torch.float32)
            if any(_is_rounded(folder, mappings[inner], weight.dtype) for inner, _ in by_expert(name, whole)):
                _read_weight(run, folder, mappings, name, whole)
                master = part.updater.master_of(main)
                master.copy_(part.own(weight, whole).view_as(master))
        part.updater.refresh()


def _is_rounded(folder: HFFolder, mapping: ParameterMapping, dtype: torch.dtype) -> bool:
    return mapping.added != 0.0 or any(_dtype(folder.entries[span.tensor]) != dtype for span in mapping.ranges)


def read_shard(folder: HFFolder, mapping: ParameterMapping, shard: torch.Tensor, tp_rank: int, tp_size: int) -> None:
    """Fill one tensor-parallel shard of a parameter, in place."""
    parameter = mapping.parameter
    assert tuple(shard.shape) == parameter.local_shape(tp_size), f"{parameter.name}: shard of shape {shard.shape}"
    columns = slices.columns(parameter, tp_rank, tp_size)
    for start, in_shard, size in slices.rows(parameter, tp_rank, tp_size):
        read_rows(folder, mapping, range(start, start + size), columns, shard[in_shard : in_shard + size])


def read_rows(folder: HFFolder, mapping: ParameterMapping, rows: range, columns: slice, target: torch.Tensor) -> None:
    """Copy rows and columns of a parameter into `target`, whose dtype may be another; padding becomes zero."""
    covered = 0
    for span in mapping.ranges:
        low, high = max(span.start, rows.start), min(span.start + span.count, rows.stop)
        if low >= high:
            continue
        covered += high - low
        entry, first = folder.entries[span.tensor], span.tensor_start + low - span.start
        wanted = target[low - rows.start : high - rows.start]
        whole_rows = mapping.is_copied and wanted.shape[1:] == entry.columns and is_stored(entry)
        if whole_rows and wanted.is_contiguous() and wanted.device.type == "cpu" and wanted.dtype == _dtype(entry):
            _read_in_place(entry, first, wanted)
            continue
        if mapping.transposed:
            view = mapping.transposed_rows(entry.whole(), span, low, high - low)
        else:
            view = entry.rows(first, high - low)
        part = torch.from_numpy(view).view(_dtype(entry))
        part = (part[:, columns] if wanted.dim() > 1 else part).reshape(wanted.shape)
        wanted.copy_(
            part if mapping.added == 0.0 else part.to(torch.promote_types(part.dtype, torch.float32)) + mapping.added
        )
    if covered < len(rows):  # padding comes last
        target[covered:].zero_()


def _dtype(entry: Entry) -> torch.dtype:
    return getattr(torch, DTYPES[entry.dtype])


def _read_in_place(entry: Entry, row: int, target: torch.Tensor) -> None:
    """Read whole rows into a contiguous tensor of the file's dtype, which is twice as fast as through a view."""
    try:
        with entry.path.open("rb", buffering=0) as file:
            bits = memoryview(target.view(-1).view(torch.uint8).numpy())
            read_exactly(file.fileno(), entry.offset_of(row), bits, entry.path)
    except EOFError as error:
        raise DataError(f"{error}. Download or write it again.") from error
