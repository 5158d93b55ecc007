"""Finds widths of a model whose matrices few bits can multiply, next to widths that they cannot."""

from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction

from megatron_ext.config.parse.options import flag_of
from megatron_ext.config.resolve import default_ffn_hidden_size
from megatron_ext.config.schema import Config
from megatron_ext.parts.catalogue import layer_parameters, tensor_size
from megatron_ext.parts.stack import stack
from megatron_ext.plugins.low_precision.formats import is_matrix
from megatron_ext.rules.suggest import use

_WIDTH = ("size", "dim", "rank", "channels")
"""Ends of the names of fields that are a width."""

Matrix = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Name of a matrix, its sides, and over how many tensor-parallel ranks each side is divided."""


def matrices_of(config: Config) -> list[Matrix]:
    """Return the matrices of each kind of layer that are multiplied in few bits, of experts one expert's."""
    found = []
    for kind, _ in stack(config).kinds:
        for parameter in layer_parameters(config, kind, experts=(0,)):
            name, shape = parameter.name.removeprefix(f"decoder.layers.{kind.number}."), tuple(parameter.shape)
            ranks = tensor_size(config, parameter)
            if is_matrix(name, shape):
                found.append((name, shape, tuple(ranks if dim == parameter.tp_dim else 1 for dim in (0, 1))))
    return found


def widths_that_fit(config: Config, side: int) -> str:
    """Return `use --flag 320 or 352, or `: the next smaller and larger widths with which the sides of all matrices on a
    rank are multiples of `side`. Where several flags have to change, they are named together; where no change of
    widths is enough, the text is empty."""
    changes = [_changes(config, side, direction) for direction in (-1, 1)]
    changes = [each for each in changes if each]
    if not changes:
        return ""
    flags = {name for each in changes for name in each}
    if len(flags) == 1:
        [name] = flags
        return use(flag_of(name), [each[name] for each in changes]) + ", or "
    return "".join(
        f"use {' '.join(f'{flag_of(name)} {value}' for name, value in each.items())}, or " for each in changes
    )


def _changes(config: Config, side: int, direction: int) -> dict[str, int]:
    """Return fields of the model with the nearest values that fit, all smaller or all larger; empty where there are
    none."""
    found: dict[str, int] = {}
    for name in (field.name for field in fields(config.model) if field.name.endswith(_WIDTH)):
        value, matrices = getattr(config.model, name), matrices_of(config)
        if not _wrong(matrices, side):
            break
        if type(value) is not int or value < 1:
            continue
        lines = _lines(config, name, value, matrices)
        if not any((size / ranks) % side for size, _, ranks in lines):
            continue
        for other in range(value + direction, 0 if direction < 0 else 2 * value + 64 * side, direction):
            sizes = [size + slope * (other - value) for size, slope, _ in lines]
            whole = all((at / ranks) % side == 0 for at, (_, _, ranks) in zip(sizes, lines, strict=True))
            if whole and (name != "hidden_size" or other % (2 * config.model.num_attention_heads) == 0):
                found[name], config = other, _with(config, name, other)
                break
    return {} if _wrong(matrices_of(config), side) else found


def _wrong(matrices: Sequence[Matrix], side: int) -> bool:
    return any(size % (side * n) for _, shape, over in matrices for size, n in zip(shape, over, strict=True))


def _lines(config: Config, name: str, value: int, matrices: Sequence[Matrix]) -> list[tuple[Fraction, Fraction, int]]:
    """Return of each side that follows from a field: the size, by how much it grows with the field, and the ranks that
    divide it. Every side is a linear function of every width."""
    doubled = matrices_of(_with(config, name, 2 * value))
    return [
        (Fraction(size), Fraction(more - size, value), ranks)
        for (_, shape, over), (_, larger, _) in zip(matrices, doubled, strict=True)
        for size, more, ranks in zip(shape, larger, over, strict=True)
        if more != size
    ]


def _with(config: Config, name: str, value: int) -> Config:
    """Return the configuration with another width, and what follows from the hidden size where it is not chosen."""
    model, changed = config.model, {name: value}
    if name == "hidden_size":
        heads, hidden = model.num_attention_heads, model.hidden_size
        if model.kv_channels is not None and heads * model.kv_channels == hidden and value % heads == 0:
            changed["kv_channels"] = value // heads
        if model.ffn_hidden_size == default_ffn_hidden_size(hidden, gated=False):
            changed["ffn_hidden_size"] = default_ffn_hidden_size(value, gated=False)
    return replace(config, model=replace(model, **changed))
