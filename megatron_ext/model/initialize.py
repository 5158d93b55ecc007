"""Initial weights as a function of (seed, global parameter name), whatever the layout.

The rule: an initial tensor is cut into blocks of whole rows, BLOCK_ELEMENTS elements or one row each. Block i holds
standard normal fp32 numbers of numpy's SFC64 generator, seeded with the SHA-256 of "seed:name:i", times the
parameter's standard deviation. A rank draws the blocks that its shard touches one after another and keeps its part,
so that it never holds more than its own weights and one block. Rows of vocabulary padding are zero. 16-bit weights
are the fp32 ones, rounded.

(torch's CPU generator draws faster but keeps only 32 bits of a seed: among the 70,000 blocks of a model with 70
billion parameters two would be equal more likely than not.)
"""

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.parameters import Parameter, parameters
from megatron_ext.config.schema import Config
from megatron_ext.model.names import global_named_tensors
from megatron_ext.parallel.groups import tensor_group

BLOCK_ELEMENTS = 1 << 20
"""Elements of one block (4 MB in fp32). Part of the rule: another value gives other weights."""


def initialize(model_chunks: Sequence[torch.nn.Module], config: Config, pg_collection: ProcessGroupCollection) -> None:
    """Fill every parameter of this rank in place, before the model is wrapped or an optimizer built.

    Args:
        model_chunks: this rank's chunks, from `model.gpt.build_model`.
        config: the resolved configuration; the seed is `--seed`.
        pg_collection: this rank's process groups.
    """
    catalogue = {parameter.name: parameter for parameter in parameters(config)}
    for name, tensor in global_named_tensors(model_chunks):
        parameter = catalogue[name]
        group = tensor_group(pg_collection, expert=parameter.expert is not None)
        fill(tensor, parameter, config.training.seed, group.rank(), group.size())


def fill(shard: torch.Tensor, parameter: Parameter, seed: int, tp_rank: int = 0, tp_size: int = 1) -> None:
    """Give one tensor-parallel shard of `parameter` its initial value, in place."""
    assert tuple(shard.shape) == parameter.local_shape(tp_size), f"{parameter.name}: shard of shape {shard.shape}"
    if parameter.init == "ones":
        shard.fill_(1.0)
        return
    shard.zero_()
    if parameter.init == "normal":
        for first_row, rows in _blocks(parameter):
            _place(shard, parameter, first_row, rows, seed, tp_rank, tp_size)


def _blocks(parameter: Parameter) -> Iterator[tuple[int, int]]:
    """(first row, number of rows) of every block; rows of padding belong to none."""
    rows = parameter.true_rows or parameter.shape[0]
    rows_per_block = _rows_per_block(parameter)
    for first_row in range(0, rows, rows_per_block):
        yield first_row, min(rows_per_block, rows - first_row)


def _place(
    shard: torch.Tensor, parameter: Parameter, first_row: int, rows: int, seed: int, tp_rank: int, tp_size: int
) -> None:
    """Draw one block, if the shard has a part of it, and copy that part."""
    if parameter.tp_dim == 1:
        columns = shard.size(1)
        block = _draw(parameter, first_row, rows, seed)
        shard[first_row : first_row + rows].copy_(block[:, tp_rank * columns : (tp_rank + 1) * columns])
        return
    ranks = tp_size if parameter.tp_dim == 0 else 1
    block = None
    # With a stride of n the whole tensor is n parts one above the other, and a shard has its share of each.
    share = shard.size(0) // parameter.tp_stride
    for part in range(parameter.tp_stride):
        start = (part * ranks + (tp_rank if ranks > 1 else 0)) * share
        low, high = max(start, first_row), min(start + share, first_row + rows)
        if low < high:
            block = _draw(parameter, first_row, rows, seed) if block is None else block
            offset = part * share - start
            shard[low + offset : high + offset].copy_(block[low - first_row : high - first_row])


def _draw(parameter: Parameter, first_row: int, rows: int, seed: int) -> torch.Tensor:
    index = first_row // _rows_per_block(parameter)
    digest = hashlib.sha256(f"{seed}:{parameter.name}:{index}".encode()).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "big")))
    block = generator.standard_normal((rows, parameter.shape[1]), dtype=np.float32)
    return torch.from_numpy(block).mul_(parameter.std)


def _rows_per_block(parameter: Parameter) -> int:
    return max(1, BLOCK_ELEMENTS // parameter.shape[1])
