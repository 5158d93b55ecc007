"""Imports a checkpoint of Megatron-DeepSpeed or GPT-NeoX: weights alone, as iteration 0, or with Adam's state at its
iteration, of a universal checkpoint, of ZeRO's shards and of a 16-bit run without ZeRO. One process does it
(`native/single_process.py`).
"""

import functools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from megatron_ext.checkpoint.dtypes import ARRAYS, WIDTH, converted
from megatron_ext.config.resolve import Facts, resolve
from megatron_ext.config.schema import Config
from megatron_ext.errors import DataError
from megatron_ext.parts import slices
from megatron_ext.parts.catalogue import WORD_EMBEDDINGS, parameters
from megatron_ext.parts.parameter import Parameter
from megatron_ext.plugins.checkpoint_tools.copying import BLOCK, ComputedBytes, FilePart
from megatron_ext.plugins.checkpoint_tools.single_process import Item, items, write_checkpoint
from megatron_ext.plugins.migrate.deepspeed_checkpoint.deepspeed_folder import DeepSpeedFolder, Shard
from megatron_ext.terminal import say, tracked


def import_deepspeed(source: str | Path, destination: str | Path) -> Path:
    """Write a checkpoint into the folder `destination`. The dtype of the weights is kept; a universal checkpoint and
    ZeRO's shards have fp32 weights.

    Returns:
        The checkpoint's own folder.
    Raises:
        ConfigurationError: the source cannot be read as a model of ours, or the destination has checkpoints.
        DataError: the source's tensors are not those that its flags describe.
        OSError: the destination cannot be written.
    """
    folder = DeepSpeedFolder(source)
    table = folder.weights.get(WORD_EMBEDDINGS)
    if not table:
        raise DataError(f"{folder.path} has no word embeddings; copy the files of all its ranks into one folder")
    entries = sum(shard.shape[0] for shard in table)
    precision = {"BF16": "bf16", "F16": "fp16"}.get(table[0].dtype)
    values = {**folder.values, "vocab_size": entries, **({precision: True} if precision else {})}
    config = resolve(values, Facts())
    _check(folder, config, entries)
    common: dict[str, object] = {"weights_only": True, "iteration": 0}
    if folder.states:
        samples = folder.samples
        state = {
            "iteration": folder.iteration,
            "consumed_samples": samples,
            "consumed_tokens": samples * config.model.seq_length,
            "scheduled_samples": samples,
        }
        count = {"iteration": folder.iteration, "optimizer_step": folder.iteration}
        common = {**count, "train_state": state, "grad_scaler": {}}
    else:
        say(
            f"{folder.path}: weights alone; for Adam's state put zero_pp_rank_*_optim_states.pt of all ranks next to "
            "them, or of a 16-bit run without ZeRO all mp_rank_* and expp_rank_* (its fp32 masters, once rounded, must "
            "be the weights)"
        )
    return write_checkpoint(destination, config, _tensors(folder, config), common)


def _tensors(folder: DeepSpeedFolder, config: Config) -> Iterator[Item]:
    states = {f"optimizer.state.{name}.": weights for name, weights in folder.states.items()}
    for prefix, weights in {"": folder.weights, **states}.items():
        for parameter in tracked(f"reading {prefix}weights", list(parameters(config))):
            shards = weights[parameter.name]
            dtype = shards[0].dtype
            elements = functools.partial(_elements, shards, _as_saved(parameter, shards), dtype)
            yield from items(config, parameter, dtype, elements, prefix)


def _as_saved(parameter: Parameter, shards: list[Shard]) -> Parameter:
    """Return the parameter with as many rows of a vocabulary as its shards have: they may be padded otherwise."""
    rows, *rest = parameter.shape
    own = sum(shard.shape[0] for shard in shards)
    of_words = parameter.stage in ("embedding", "output") and parameter.tp_dim == 0
    return replace(parameter, shape=(own, *rest)) if of_words and own < rows else parameter


def _check(folder: DeepSpeedFolder, config: Config, entries: int) -> None:
    """Check that there are all parameters of the model and no others, each with the shape of its shards.

    Raises:
        DataError: they are not; all differences are named.
    """
    problems = []
    known = {one.name: one for one in parameters(config)}
    for state, weights in ({"weights": folder.weights} | folder.states).items():
        problems += [f"{state} of {name} are missing" for name in known if name not in weights]
        problems += [f"{name} is no parameter of this model" for name in weights if name not in known]
        for name in known.keys() & weights.keys():
            parameter, shards = _as_saved(known[name], weights[name]), weights[name]
            if parameter.true_rows is not None and parameter.shape[0] != entries:
                problems.append(f"{name} has {parameter.shape[0]} rows; the embeddings have {entries}")
            shape = parameter.local_shape(len(shards))
            wrong = {shard.shape for shard in shards} - {shape}
            if wrong:
                problems.append(f"{name} has shards of {sorted(wrong)}; by its flags they should have {shape}")
    if problems:
        raise DataError(f"{folder.path} is not the model that its flags describe: {'; '.join(problems[:20])}")


def _elements(shards: list[Shard], parameter: Parameter, dtype: str, rows: range) -> Iterator[FilePart]:
    """Yield the elements of these rows of a parameter; padding, which comes last, is zero."""
    width = WIDTH[dtype]
    for size in parameter.shape[1:]:
        width *= size
    step = max(1, BLOCK // width)
    for start in range(rows.start, rows.stop, step):
        part = range(start, min(start + step, rows.stop))
        yield ComputedBytes(len(part) * width, functools.partial(_merge, shards, parameter, dtype, part))


def _merge(shards: list[Shard], parameter: Parameter, dtype: str, rows: range, target: memoryview) -> None:
    """Fill `target` with rows of a parameter that tensor-parallel ranks divide, or each hold whole.

    Of a parameter that each rank holds whole, the mean over the ranks is taken: in the published BLOOM the ranks' norms
    have drifted apart.
    """
    import numpy as np

    values = np.frombuffer(target, ARRAYS[dtype]).reshape(len(rows), *parameter.shape[1:])
    values[...] = 0
    if parameter.tp_dim is None:
        copies = [shard.rows(rows.start, len(rows)) for shard in shards]
        if all(np.array_equal(copies[0], other) for other in copies[1:]):
            values[...] = converted(copies[0], shards[0].dtype, dtype)
        else:
            wide = [converted(one, shard.dtype, "F32") for one, shard in zip(copies, shards, strict=True)]
            values[...] = converted(np.mean(wide, axis=0, dtype=np.float32), "F32", dtype)
        return
    for rank, shard in enumerate(shards):
        columns = slices.columns(parameter, rank, len(shards))
        for start, in_shard, size in slices.rows(parameter, rank, len(shards)):
            low, high = max(start, rows.start), min(start + size, rows.stop)
            if low < high:
                part = converted(shard.rows(in_shard + low - start, high - low), shard.dtype, dtype)
                own = values[low - rows.start : high - rows.start]
                (own if own.ndim == 1 else own[:, columns])[...] = part
