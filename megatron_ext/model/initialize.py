"""Draws initial weights as a function of (seed, global parameter name), whatever the layout.

An initial tensor is cut into blocks of whole rows, BLOCK_ELEMENTS elements or one row each. Block i holds standard
normal fp32 numbers (or uniform ones of the same variance) of numpy's SFC64 generator, seeded with the SHA-256 of
"seed:name:i", times the parameter's standard deviation. A rank draws the blocks that its shard touches one after
another and keeps its part, so that it never holds more than its own weights and one block. Rows of vocabulary padding
are zero. 16-bit weights are the fp32 ones, rounded.

(torch's CPU generator draws faster but keeps only 32 bits of a seed: among the 70,000 blocks of a model with 70
billion parameters two would be equal more likely than not.)
"""

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config import slices
from megatron_ext.config.parameters import Parameter, parameters
from megatron_ext.config.schema import Config
from megatron_ext.model.names import by_expert, global_named_parameters
from megatron_ext.parallel.groups import tensor_group
from megatron_ext.parallel.rows import row_shard

BLOCK_ELEMENTS = 1 << 20
"""Elements of one block (4 MB in fp32). Part of the rule: another value gives other weights."""


def initialize(model_chunks: Sequence[torch.nn.Module], config: Config, pg_collection: ProcessGroupCollection) -> None:
    """Fill every parameter of this rank in place, before an optimizer is built.

    Args:
        model_chunks: this rank's chunks, from `model.gpt.build_model`, or their shards.
        config: the resolved configuration; the seed is `--seed`.
        pg_collection: this rank's process groups.
    """
    catalogue = {parameter.name: parameter for parameter in parameters(config)}
    seed = config.training.seed
    for name, weight in global_named_parameters(model_chunks):
        rows = row_shard(weight)
        if rows is not None:
            tp = pg_collection.tp
            fill(rows.local, catalogue[name], seed, tp.rank(), tp.size(), first_row=rows.first)
            if config.training.bf16:
                # The masters begin as the 16-bit weights, as megatron-core has it, so that all layouts agree.
                rows.local.copy_(rows.local.bfloat16())
            continue
        for inner, tensor in by_expert(name, weight.data):
            parameter = catalogue[inner]
            group = tensor_group(pg_collection, expert=parameter.expert is not None)
            fill(tensor, parameter, seed, group.rank(), group.size())


def fill(
    shard: torch.Tensor, parameter: Parameter, seed: int, tp_rank: int = 0, tp_size: int = 1, first_row: int = 0
) -> None:
    """Give one tensor-parallel shard of `parameter`, or some rows of it, its initial value, in place.

    Args:
        first_row: index in the tensor-parallel shard; `shard` holds the rows from there on.
    """
    shape = parameter.local_shape(tp_size)
    assert shard.shape[1:] == shape[1:], f"{parameter.name}: shard of shape {shard.shape}"
    assert first_row + len(shard) <= shape[0], f"{parameter.name}: shard of shape {shard.shape} from row {first_row}"
    if parameter.init == "ones":
        shard.fill_(1.0)
        return
    shard.zero_()
    if parameter.init in ("normal", "uniform"):
        for first, rows in _blocks(parameter):
            _place(shard, parameter, first, rows, seed, tp_rank, tp_size, first_row)


def _blocks(parameter: Parameter) -> Iterator[tuple[int, int]]:
    """Yield (first row, number of rows) of every block; rows of padding belong to none."""
    rows = parameter.true_rows or parameter.shape[0]
    rows_per_block = _rows_per_block(parameter)
    for first_row in range(0, rows, rows_per_block):
        yield first_row, min(rows_per_block, rows - first_row)


def _place(
    shard: torch.Tensor,
    parameter: Parameter,
    first: int,
    rows: int,
    seed: int,
    tp_rank: int,
    tp_size: int,
    shard_first: int,
) -> None:
    """Draw the block of `rows` rows from `first` on, if the shard has a part of it, and copy that part."""
    columns = slices.columns(parameter, tp_rank, tp_size)
    block = None
    for piece in slices.rows(parameter, tp_rank, tp_size):
        offset = piece.in_shard - piece.start - shard_first  # from a row of the whole tensor to one of `shard`
        low = max(piece.start, first, -offset)
        high = min(piece.start + piece.size, first + rows, len(shard) - offset)
        if low < high:
            block = _draw(parameter, first, rows, seed) if block is None else block
            shard[low + offset : high + offset].copy_(block[low - first : high - first, columns])


def _draw(parameter: Parameter, first_row: int, rows: int, seed: int) -> torch.Tensor:
    index = first_row // _rows_per_block(parameter)
    digest = hashlib.sha256(f"{seed}:{parameter.name}:{index}".encode()).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "big")))
    shape = (rows, parameter.shape[1])
    if parameter.init == "uniform":
        block = torch.from_numpy(generator.random(shape, dtype=np.float32))
        return block.mul_(2.0).sub_(1.0).mul_(math.sqrt(3.0) * parameter.std)
    block = generator.standard_normal(shape, dtype=np.float32)
    return torch.from_numpy(block).mul_(parameter.std)


def _rows_per_block(parameter: Parameter) -> int:
    return max(1, BLOCK_ELEMENTS // parameter.shape[1])
