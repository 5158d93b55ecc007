"""Finds where the rows of our parameters lie in a family's tensors: a parameter is a list of ranges of rows."""

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron_ext.config.schema import Config
from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.attention.describe import Attention
from megatron_ext.parts.catalogue import Parameter, parameters, states
from megatron_ext.parts.stack import Layer, layers
from megatron_ext.plugins.families.family import Family, Sections
from megatron_ext.plugins.families.shared import NEXT_TOKEN_COPIES, QKV

if TYPE_CHECKING:
    import numpy.typing as npt

_LAYER = re.compile(r"(?:decoder\.layers\.\d+|mtp\.layers\.(?P<depth>\d+)(?P<inner>\.transformer_layer)?)\.")
_EXPERT = "mlp.experts."


@dataclass(frozen=True)
class RowRange:
    """Says that rows `start` to `start + count` of a parameter are rows `tensor_start` and on of a Hugging Face
    tensor."""

    tensor: str
    tensor_start: int
    start: int
    count: int
    step: int = 1
    """Which rows of the tensor they are: every one, or every second, in a transposed tensor alone."""


@dataclass(frozen=True)
class ParameterMapping:
    """Says where the rows of one parameter lie. Rows that no range covers are vocabulary padding, and zero."""

    parameter: Parameter
    ranges: tuple[RowRange, ...]
    transposed: bool
    """Whether the Hugging Face tensors are [columns, rows] of the parameter, [1, rows] of a vector."""

    added: float = 0.0
    """Number to add to each element of the Hugging Face tensors to get the parameter's."""

    stacked: int = 0
    """Number of matrices that lie one below the other in each of the tensors, of which this is one; 0 where it is
    not."""

    shape: tuple[int, ...] | None = None
    """Shape of the Hugging Face tensor of a vector, where that is no vector; -1 stands for the vector's size."""

    dtype: str | None = None
    """The dtype that the parameter has in our files and in Hugging Face's, as safetensors names it, whatever dtype the
    weights have."""

    @property
    def is_copied(self) -> bool:
        """Whether the parameter's rows and the Hugging Face rows are the same bytes, where both have one dtype."""
        return not self.transposed and self.added == 0.0

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of the Hugging Face tensors that hold this parameter."""
        rows: dict[str, int] = {}
        for span in self.ranges:
            rows[span.tensor] = rows.get(span.tensor, 0) + span.count
        if self.shape is not None:
            return {name: tuple(count if size == -1 else size for size in self.shape) for name, count in rows.items()}
        columns = self.parameter.shape[1:]
        across = columns if self.stacked else columns or (1,)
        stack = (self.stacked,) if self.stacked else ()
        return {
            name: (*stack, *across, count) if self.transposed else (*stack, count, *columns)
            for name, count in rows.items()
        }

    def transposed_rows(self, tensor: "npt.NDArray", span: RowRange, start: int, count: int) -> "npt.NDArray":
        """Return the place of rows of this parameter, [count, columns], in the transposed tensor of one of its ranges.

        Args:
            tensor: the whole tensor as a matrix; of several matrices, one lies below the other.
            start: index of the first of the rows in the parameter.
        """
        if self.stacked:
            columns = (*self.parameter.shape, 1)[1]
            above = (self.parameter.expert or 0) * columns
            tensor = tensor[above : above + columns]
        first = span.tensor_start + (start - span.start) * span.step
        return tensor.T[first : first + count * span.step : span.step]


def state_dict_mapping(config: Config, family: Family) -> list[ParameterMapping]:
    """Return every parameter of the model, and every bias of experts, with the tensors of the family that hold its
    rows."""
    family = replace(family, names={**family.names, **family.dependent_names(config.model)})
    held = layers(config)
    found = [
        _parameter_mapping(parameter, held[parameter.stage] if isinstance(parameter.stage, int) else None, family)
        for parameter in parameters(config)
    ]
    numbers = {layer.name: layer.number for layer in held}
    biases = ((one, one.name.partition(".mlp.")[0]) for one in states(config) if one.kind == "buffer")
    kept = (Parameter(one.name, one.shape, numbers[layer], "zeros") for one, layer in biases)
    return found + [replace(_parameter_mapping(bias, None, family), dtype="F32") for bias in kept]


def copies(config: Config, family: Family) -> dict[str, str]:
    """Return the tensors of the family that repeat another one -> the repeated one: each depth of multi-token
    prediction has embedding and output layer once more."""
    tied = not config.model.untie_embeddings_and_output_weights
    ours = {theirs: NEXT_TOKEN_COPIES["embed_tokens"] if tied else one for theirs, one in NEXT_TOKEN_COPIES.items()}
    return {
        f"{family.layers.format(layer.number)}{theirs}.weight": f"{family.names[module][0]}.weight"
        for layer in layers(config)
        if layer.next_token is not None and not family.ahead
        for theirs, module in ours.items()
    }


def _parameter_mapping(parameter: Parameter, held: Layer | None, family: Family) -> ParameterMapping:
    module, _, kind = parameter.name.rpartition(".")
    prefix = ""
    if found := _LAYER.match(module):
        module = module[found.end() :]
        assert isinstance(parameter.stage, int)
        prefix = family.layers.format(parameter.stage // 2 if family.halves else parameter.stage)
        if family.ahead and (depth := found["depth"]):
            prefix = family.ahead.format(depth) if found["inner"] else ""
    if parameter.expert is not None:
        module = _EXPERT + module.removeprefix(f"{_EXPERT}{parameter.expert}.")
    whole = family.names.get(f"{module}.{kind}")
    if whole is None and module not in family.names:
        raise ConfigurationError(
            f"the family {family.model_type} has no name for {module}, which this model has ({parameter.name}): add "
            f"{module!r} to its names (docs/own_mixer.md), or choose another --hf-model-type"
        )
    names = whole or tuple(f"{name}.{kind}" for name in family.names[module])
    stacked = 0
    if held is not None and held.experts is not None and parameter.expert is not None and "{}" not in names[0]:
        stacked = held.experts.count
    is_weight = kind == "weight"
    added = family.added.get(module, 0.0) if is_weight else 0.0
    transposed = (module if is_weight else f"{module}.{kind}") in family.transposed
    tensors = [f"{prefix}{name.format(parameter.expert)}" for name in names]
    rows = parameter.true_rows or parameter.shape[0]
    if module == QKV and not family.qkv_by_groups:
        assert held is not None
        layout = _in_blocks(tensors, held.attention, family.qkv_blocks) if family.qkv_blocks else None
        ranges = tuple(layout or _grouped(tensors, held.attention))
    elif module in family.alternating:
        ranges = tuple(RowRange(tensors[0], half, half * rows // 2, rows // 2, 2) for half in range(2))
    elif sections := family.sections.get(module):
        ranges = tuple(_in_sections(tensors, parameter, sections))
    else:
        count = rows // len(tensors)
        first = (parameter.expert or 0) * count if stacked and not transposed else 0
        ranges = tuple(RowRange(tensor, first, index * count, count) for index, tensor in enumerate(tensors))
    if family.rotates != "as-ours" and held is not None and held.has_attention:
        ranges = tuple(_rotated(ranges, *_heads(parameter, module, held.attention, family.rotates)))
    shape = family.shapes.get(f"{module}.{kind}")
    return ParameterMapping(parameter, ranges, transposed=transposed, added=added, stacked=stacked, shape=shape)


def _grouped(tensors: list[str], attention: Attention) -> Iterator[RowRange]:
    """Yield the rows of megatron-core's fused QKV: for each query group its query heads, then its key head and its
    value head. With gates, the gates follow the group's queries; in Hugging Face's tensors each gate follows its own
    query, or the gates are a tensor of their own."""
    groups, keys, values = attention.groups, attention.head_size, attention.value_head_size
    parts, heads = 2 if attention.gate else 1, attention.query_heads // groups
    queries = sum(attention.sections[:parts])
    if len(tensors) == 1:
        tensors = tensors * 3
        first_key, first_value = queries * groups, (queries + keys) * groups
    else:
        first_key = first_value = 0
    query, *gates, key, value = tensors
    for group in range(groups):
        start = group * (queries + keys + values)
        if gates:
            own, gate = attention.query_size // groups, attention.gate_size // groups
            yield RowRange(query, group * own, start, own)
            yield RowRange(gates[0], group * gate, start + own, gate)
        elif attention.gate:
            for part, head in itertools.product(range(parts), range(heads)):
                row = (group * heads + head) * parts + part
                yield RowRange(query, row * keys, start + (part * heads + head) * keys, keys)
        else:
            yield RowRange(query, group * queries, start, queries)
        yield RowRange(key, first_key + group * keys, start + queries, keys)
        yield RowRange(value, first_value + group * values, start + queries + keys, values)


def _in_blocks(tensors: list[str], attention: Attention, blocks: int) -> Iterator[RowRange]:
    """Yield the same rows of a fused QKV that lies in blocks of heads: the queries of a block, its values, its keys."""
    size, heads = attention.head_size, attention.query_heads // blocks
    for head, (part, place) in itertools.product(range(attention.query_heads), enumerate((0, 2, 1))):
        block, inside = divmod(head, heads)
        row = ((block * 3 + place) * heads + inside) * size
        yield RowRange(tensors[0], row, (head * 3 + part) * size, size)


def _heads(parameter: Parameter, module: str, attention: Attention, rotates: str) -> tuple[list[int], list[int]]:
    """Return the first of the rows of each head of queries and keys in a matrix of ours that are rotated, and for each
    of these rows its place among them in the Hugging Face tensor."""
    name, size = module.removeprefix("self_attention."), attention.rotary_size
    half, starts = size // 2, []
    order = [(row + half) % size for row in range(size)]
    if rotates == "halves":
        order = [row // 2 + row % 2 * half for row in range(size)]
    if module == QKV:
        heads = attention.query_heads // attention.groups + 1  # of a group, with its key
        group = heads * attention.head_size + attention.value_head_size
        starts = [first * group + head * size for first in range(attention.groups) for head in range(heads)]
    elif name in ("linear_q_proj", "linear_q_up_proj"):
        starts = [(head + 1) * attention.head_size - size for head in range(attention.query_heads)]
    elif name == "linear_kv_down_proj":
        starts = [parameter.shape[0] - size]
    return starts, order


def _rotated(ranges: Iterable[RowRange], starts: list[int], order: list[int]) -> Iterator[RowRange]:
    """Yield the ranges of a parameter whose rows from each of `starts` on lie in another order."""
    rows = [(one.tensor, one.tensor_start + row) for one in ranges for row in range(one.count)]
    for start in starts:
        rows[start : start + len(order)] = [rows[start + row] for row in order]
    first = 0
    for row in range(1, len(rows) + 1):
        if row == len(rows) or rows[row] != (rows[row - 1][0], rows[row - 1][1] + 1):
            yield RowRange(*rows[first], first, row - first)
            first = row


def _in_sections(tensors: list[str], parameter: Parameter, sections: Sections) -> Iterator[RowRange]:
    """Yield the rows of a matrix of groups of sections."""
    groups, own = parameter.shape[0] // sum(parameter.sections), iter(parameter.sections)
    of_tensors = [
        (tensor, [next(own) for _ in range(count)]) for tensor, count in zip(tensors, sections.counts, strict=True)
    ]
    start = 0
    for group in range(groups):
        for tensor, sizes in of_tensors:
            order = sections.order or range(len(sizes))
            before = dict(zip(order, itertools.accumulate((sizes[one] for one in order), initial=0), strict=False))
            for index, size in enumerate(sizes):
                first = before[index]
                row = group * sum(sizes) + first if sections.by_groups else groups * first + group * size
                yield RowRange(tensor, row, start, size)
                start += size
