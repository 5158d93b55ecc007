"""Draws initial weights as a function of (seed, global parameter name), whatever the layout.

An initial tensor is cut into blocks of whole rows, BLOCK_ELEMENTS elements or one row each. Block i holds standard
normal fp32 numbers (or uniform ones of the same variance) of numpy's SFC64 generator, seeded with the SHA-256 of
"seed:name:i", times the parameter's standard deviation. Where tensor parallelism divides the columns of a matrix of
more than WHOLE_ELEMENTS, each block is cut once more, into equal ranges of columns: as many as the largest power of
two up to COLUMN_PARTS that divides the columns, whatever the number of ranks. Part j of block i is seeded with
"seed:name:i:j". So a rank draws the blocks and parts that its shard touches, and little that it does not keep.

A few threads draw blocks while one copies what is kept, in the order of the rows: a rank never holds more than its own
weights and the blocks under way. Which thread drew a block changes nothing. Rows of vocabulary padding are zero.
16-bit weights are the fp32 ones, rounded.

(torch's CPU generator draws faster but keeps only 32 bits of a seed: among the 70,000 blocks of a model with 70
billion parameters two would be equal more likely than not.)
"""

import hashlib
import math
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config.schema import Config
from megatron_ext.model.names import by_expert, global_named_parameters
from megatron_ext.parallel.groups import tensor_group
from megatron_ext.parallel.rows import row_shard
from megatron_ext.parts import slices
from megatron_ext.parts.catalogue import Parameter, parameters

BLOCK_ELEMENTS = 1 << 20
"""Elements of one block (4 MB in fp32). Another value of this or the next two constants gives other weights."""

WHOLE_ELEMENTS = 1 << 18
"""A matrix of no more elements has blocks of whole rows however it is divided: it is drawn in two milliseconds."""

COLUMN_PARTS = 64
"""The most parts of a block of a matrix whose columns are divided."""

_MOST_THREADS = 8  # each with a block of 4 MB

_DRAWN = ("normal", "uniform", "log-uniform", "log-count", "time-step")
"""Initializations that give elements numbers of their own: all but log-count draw them."""


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
        first_row: index in the tensor-parallel shard; `shard` holds the rows from this one on.
    """
    if shard.dim() != 2 and parameter.init in _DRAWN:
        matrix = replace(parameter, shape=(parameter.shape[0], math.prod(parameter.shape[1:])))
        fill(shard.view(len(shard), matrix.shape[1]), matrix, seed, tp_rank, tp_size, first_row)
        return
    shape = parameter.local_shape(tp_size)
    assert shard.shape[1:] == shape[1:], f"{parameter.name}: shard of shape {shard.shape}"
    assert first_row + len(shard) <= shape[0], f"{parameter.name}: shard of shape {shard.shape} from row {first_row}"
    if parameter.init in ("ones", "constant"):
        shard.fill_(1.0 if parameter.init == "ones" else parameter.std)
        return
    shard.zero_()
    if parameter.init not in _DRAWN:
        return
    columns = range(parameter.shape[1])[slices.columns(parameter, tp_rank, tp_size)]
    blocks = list(_touched(parameter, slices.rows(parameter, tp_rank, tp_size), first_row, len(shard)))
    for block, values in _drawn(parameter, seed, blocks, columns):
        for place in block.places:
            shard[place.in_shard : place.in_shard + place.size].copy_(values[place.start : place.start + place.size])


class _Block(NamedTuple):
    """A block of the whole tensor, some of whose rows a shard has."""

    number: int
    rows: int
    places: list[slices.Piece]
    """Rows that the shard keeps; each starts at a row of the block."""


def _touched(parameter: Parameter, held: Sequence[slices.Piece], first_row: int, length: int) -> Iterator[_Block]:
    """Yield the blocks that a shard has rows of; rows of padding belong to none.

    Args:
        held: rows of the whole that make the tensor-parallel shard.
        first_row: index, in the tensor-parallel shard, of the first of the `length` rows.
    """
    rows = parameter.true_rows or parameter.shape[0]
    rows_per_block = _rows_per_block(parameter)
    for index, first in enumerate(range(0, rows, rows_per_block)):
        last = min(first + rows_per_block, rows)
        places = []
        for piece in held:
            offset = piece.in_shard - piece.start - first_row  # from a row of the whole tensor to one of the shard
            low, high = max(piece.start, first, -offset), min(piece.start + piece.size, last, length - offset)
            if low < high:
                places.append(slices.Piece(low - first, low + offset, high - low))
        if places:
            yield _Block(index, last - first, places)


def _drawn(
    parameter: Parameter, seed: int, blocks: Sequence[_Block], columns: range
) -> Iterator[tuple[_Block, torch.Tensor]]:
    """Yield blocks in their order, each with its values in `columns`. Threads draw the next ones meanwhile: as many as
    torch may use here."""
    threads = min(torch.get_num_threads(), _MOST_THREADS, len(blocks))
    if threads <= 1:
        for block in blocks:
            yield block, torch.from_numpy(_draw(parameter, seed, block, columns))
        return
    under_way: deque[tuple[_Block, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for block in blocks:
            under_way.append((block, pool.submit(_draw, parameter, seed, block, columns)))
            if len(under_way) > threads:
                first, values = under_way.popleft()
                yield first, torch.from_numpy(values.result())
        for block, values in under_way:
            yield block, torch.from_numpy(values.result())


def _draw(parameter: Parameter, seed: int, block: _Block, columns: range) -> np.ndarray:
    """Return the values of a block in `columns`, in fp32."""
    if parameter.init == "log-count":
        return np.tile(np.log(np.array(columns, dtype=np.float32) + np.float32(1.0)), (block.rows, 1))
    parts, name = column_parts(parameter), f"{seed}:{parameter.name}:{block.number}"
    scale = np.float32(math.sqrt(3.0) * parameter.std if parameter.init == "uniform" else parameter.std)
    width = parameter.shape[1] // parts
    numbers = np.empty((block.rows, width), dtype=np.float32)
    if parts == 1:
        _fill_numbers(numbers, parameter, name)
        if parameter.init == "log-uniform":
            np.log(8.5 + 7.5 * numbers, out=numbers)
        elif parameter.init == "time-step":
            np.power(10.0, numbers - np.float32(2.0), out=numbers)
            numbers += np.log(-np.expm1(-numbers))  # what softplus takes back
        else:
            numbers *= scale
        return numbers[:, columns.start : columns.stop]
    values = np.empty((block.rows, len(columns)), dtype=np.float32)
    for part in range(columns.start // width, -(-columns.stop // width)):
        _fill_numbers(numbers, parameter, f"{name}:{part}")
        first = part * width
        low, high = max(first, columns.start), min(first + width, columns.stop)
        place = values[:, low - columns.start : high - columns.start]
        np.multiply(numbers[:, low - first : high - first], scale, out=place)
    return values


def _fill_numbers(numbers: np.ndarray, parameter: Parameter, seed: str) -> None:
    """Draw the numbers that follow from one seed: normal ones of variance 1, or uniform ones from -1 to 1."""
    digest = hashlib.sha256(seed.encode()).digest()
    generator = np.random.Generator(np.random.SFC64(int.from_bytes(digest, "big")))
    if parameter.init == "normal":
        generator.standard_normal(dtype=np.float32, out=numbers)
        return
    generator.random(dtype=np.float32, out=numbers)
    numbers *= np.float32(2.0)
    numbers -= np.float32(1.0)


def _rows_per_block(parameter: Parameter) -> int:
    return max(1, BLOCK_ELEMENTS // parameter.shape[1])


def column_parts(parameter: Parameter) -> int:
    """Return the number of ranges of columns into which each block is cut."""
    if parameter.tp_dim != 1 or parameter.size <= WHOLE_ELEMENTS:
        return 1
    return math.gcd(parameter.shape[1], COLUMN_PARTS)
