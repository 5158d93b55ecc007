"""Reads the forms in which files hold the same tensors: as the family names and divides them, with the matrices of all
experts in one tensor, or quantized.

What lies otherwise is an entry whose rows are computed when they are asked for; nothing is held in memory. Quantized
weights become bf16, as the programs that publish them unquantize them: the product of value and scale in fp32, rounded
once.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron_ext.checkpoint.dtypes import WIDTH, converted
from megatron_ext.plugins.families.family import Family
from megatron_ext.plugins.families.state_dict_mapping import ParameterMapping
from megatron_ext.plugins.huggingface.safetensors import Entry

if TYPE_CHECKING:
    import numpy.typing as npt

_Rows = Callable[[int, int, bool], "npt.NDArray"]


@dataclass(frozen=True)
class ComputedEntry(Entry):
    """A tensor that lies in no file as it is."""

    make: _Rows
    """Returns `count` rows from `start` on, and whether they shall be writable."""

    def rows(self, start: int, count: int, *, writable: bool = False) -> "npt.NDArray":
        """Return `count` rows; bfloat16 are uint16."""
        return self.make(start, count, writable)

    def whole(self, *, writable: bool = False) -> Any:
        """Return all of it; rows that nobody takes are not computed."""
        return _AllRows(self, writable)


@dataclass(frozen=True)
class _AllRows:
    entry: ComputedEntry
    writable: bool

    def __getitem__(self, rows: slice) -> "npt.NDArray":
        return self.entry.rows(rows.start, rows.stop - rows.start, writable=self.writable)

    @property
    def T(self) -> "npt.NDArray":
        """All of it transposed, as numpy calls it."""
        return self[0 : math.prod(self.entry.shape[:-1])].T


def is_stored(entry: Entry) -> bool:
    """Return whether the bytes of the tensor lie in its file as they are."""
    return not isinstance(entry, ComputedEntry)


def _part(entry: Entry, first: int, shape: tuple[int, ...]) -> Entry:
    """Return rows of a tensor from `first` on as a tensor of this shape."""
    if not isinstance(entry, ComputedEntry):
        return replace(entry, shape=shape, offset=entry.offset_of(first))
    make = entry.make
    return replace(entry, shape=shape, make=lambda start, count, writable: make(first + start, count, writable))


def _turned(entry: Entry, expert: int, first: int, shape: tuple[int, ...]) -> Entry:
    """Return columns of one matrix of a stack, from `first` on, as the rows of a tensor of this shape."""
    depth = entry.shape[1]

    def make(start: int, count: int, writable: bool) -> "npt.NDArray":
        matrix = entry.rows(expert * depth, depth, writable=writable)
        return matrix[:, first + start : first + start + count].T

    return ComputedEntry(entry.path, entry.dtype, shape, -1, make)


def experts_apart(entries: dict[str, Entry], family: Family) -> dict[str, Entry]:
    """Return the tensors with a matrix for each expert, as the family names them, where the files hold the matrices of
    all experts in one tensor, gate and up projection together: [experts, out, in], or transposed as Qwen3-VL has
    them."""
    names = family.names.get("mlp.experts.linear_fc1", ())
    if len(names) != 2 or "{}" not in names[0]:
        return entries
    stem = names[0].partition("{}")[0]
    down_name = family.names["mlp.experts.linear_fc2"][0]
    found = dict(entries)
    for name, both in entries.items():
        prefix, is_stack, _ = name.partition(f"{stem}gate_up_proj")
        down = entries.get(f"{prefix}{stem}down_proj")
        if not is_stack or down is None or len(both.shape) != 3 or len(down.shape) != 3:
            continue
        is_turned = both.shape[2] == 2 * down.shape[1]
        width, hidden = (down.shape[1], down.shape[2]) if is_turned else (down.shape[2], down.shape[1])
        if both.shape != (down.shape[0], *((hidden, 2 * width) if is_turned else (2 * width, hidden))):
            continue  # which are then named as missing
        for expert in range(both.shape[0]):
            of_expert = {f"{one}.weight": part for part, one in enumerate(names)}
            for theirs, half in of_expert.items():
                at, shape = half * width, (width, hidden)
                first = expert * both.shape[1] + at
                one = _turned(both, expert, at, shape) if is_turned else _part(both, first, shape)
                found[f"{prefix}{theirs.format(expert)}"] = one
            shape = (hidden, width)
            own = _turned(down, expert, 0, shape) if is_turned else _part(down, expert * hidden, shape)
            found[f"{prefix}{down_name.format(expert)}.weight"] = own
        del found[name], found[f"{prefix}{stem}down_proj"]
    return found


def equal_thirds(entries: Mapping[str, Entry], mappings: Iterable[ParameterMapping]) -> dict[str, Entry]:
    """Return the convolutions of delta rules that lie in three tensors of equal size, the last one the rest, whatever
    the sizes of queries, keys and values, as transformers 5.23 writes the convolutions of an OLMo hybrid."""
    found: dict[str, Entry] = {}
    for mapping in mappings:
        shapes = mapping.tensor_shapes()
        held = [one for name in shapes if (one := entries.get(name)) is not None]
        if not mapping.parameter.name.endswith("self_attention.conv1d.weight") or len(held) != 3 or len(shapes) != 3:
            continue
        sizes = [shape[0] for shape in shapes.values()]
        third = -(-sum(sizes) // 3)
        thirds = [third, third, sum(sizes) - 2 * third]
        if [one.shape[0] for one in held] == thirds != sizes:
            first = 0
            for (name, shape), size in zip(shapes.items(), sizes, strict=True):
                make = _one_below_the_other(held, first)
                middle = held[0].shape[1:]
                found[name] = ComputedEntry(held[0].path, held[0].dtype, (shape[0], *middle), -1, make)
                first += size
    return found


def _one_below_the_other(parts: list[Entry], first: int) -> _Rows:
    def make(start: int, count: int, writable: bool) -> "npt.NDArray":
        import numpy as np

        assert not writable
        return np.concatenate([part.whole() for part in parts])[first + start : first + start + count]

    return make


def dequantized(entries: Mapping[str, Entry], block: tuple[int, int] | None) -> tuple[dict[str, Entry], int]:
    """Return the tensors with quantized ones in bf16 and without their scales, and how many of them there are.

    Args:
        block: rows and columns that have a scale in common, where the files do not show it.
    """
    found, used = dict(entries), set[str]()
    count = 0
    for name in entries:
        for made, needed, one in (*_fp8(entries, name, block), *_mxfp4(entries, name), *_int4(entries, name)):
            used |= {*needed}
            found[made] = one
            count += 1
    return {name: entry for name, entry in found.items() if name not in used}, count


_Found = Iterator[tuple[str, tuple[str, ...], Entry]]


def _fp8(entries: Mapping[str, Entry], name: str, block: tuple[int, int] | None) -> _Found:
    """Yield a weight in 8 bits with a scale for each block, as DeepSeek-V3 has them, row or tensor."""
    entry = entries[name]
    scale_name = next((one for one in (f"{name}_scale_inv", f"{name}_scale") if one in entries), None)
    if entry.dtype != "F8_E4M3" or scale_name is None or len(entry.shape) < 2:
        return
    scales, module = entries[scale_name], name.removesuffix("weight")
    depth, width = entry.shape[-2:]
    grid = scales.shape[-2:] if len(scales.shape) > 1 else (1, 1)
    if 0 in (depth, width, *grid) or scales.dtype not in WIDTH:
        return
    high, wide = block if block and len(scales.shape) > 1 else (-(-depth // grid[0]), -(-width // grid[1]))
    stacks = math.prod(scales.shape[:-2])
    fits = grid == (1, 1) or (grid == (-(-depth // high), -(-width // wide)) and stacks == math.prod(entry.shape[:-2]))
    if not fits or math.prod(scales.shape) not in (1, stacks * grid[0] * grid[1]):
        return

    def make(start: int, count: int, writable: bool) -> "npt.NDArray":
        import numpy as np

        assert not writable
        bits = np.memmap(entry.path, np.uint8, "r", entry.offset + start * width, (count, width))
        all_scales = _wide(scales).reshape(-1, grid[1])
        numbers = np.arange(start, start + count)
        row = numbers // depth * grid[0] + numbers % depth // high if len(all_scales) > 1 else numbers * 0
        factors = np.repeat(all_scales[row], wide, axis=1)[:, :width]
        return converted(_fp8_values()[bits] * factors, "F32", "BF16")

    needed = (scale_name, *(f"{module}{one}" for one in _OF_INPUTS))
    yield name, needed, ComputedEntry(entry.path, "BF16", entry.shape, -1, make)


_OF_INPUTS = ("activation_scale", "input_scale")
"""Scales by which products in 8 bits would round their inputs."""


def _wide(entry: Entry) -> "npt.NDArray":
    rows = entry.rows(0, max(1, math.prod(entry.shape[:-1] if entry.columns else entry.shape)))
    return converted(rows, entry.dtype, "F32").reshape(-1)


@functools.cache
def _fp8_values() -> "npt.NDArray":
    """Return the value of each byte as e4m3fn (Micikevicius et al. 2022, arXiv:2209.05433, table 1)."""
    import numpy as np

    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size[codes & 127 == 127] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


def _mxfp4(entries: Mapping[str, Entry], name: str) -> _Found:
    """Yield the matrices of experts in 4 bits, [experts, out, in / 32, 16] bytes with a power of two for each 32, as
    GPT-OSS has them; unquantized they are [experts, in, out]."""
    made = name.removesuffix("_blocks")
    scales = entries.get(f"{made}_scales")
    if made == name or scales is None or len(entries[name].shape) != 4:
        return
    blocks = entries[name]
    experts, out, groups, size = blocks.shape
    if {blocks.dtype, scales.dtype} != {"U8"} or size != 16 or scales.shape != (experts, out, groups) or not groups:
        return
    depth = groups * 32

    def make(start: int, count: int, writable: bool) -> "npt.NDArray":
        import numpy as np

        assert not writable
        parts = []
        for expert in range(start // depth, (start + count - 1) // depth + 1):
            bits = np.memmap(blocks.path, np.uint8, "r", blocks.offset + expert * out * depth // 2, (out * groups, 16))
            powers = np.memmap(scales.path, np.uint8, "r", scales.offset + expert * out * groups, (out * groups, 1))
            pairs = np.stack((bits & 15, bits >> 4), axis=-1).reshape(out * groups, 32)
            values = np.ldexp(np.array(_FP4, np.float32)[pairs], powers.astype(np.int32) - 127)
            parts.append(converted(values, "F32", "BF16").reshape(out, depth).T)
        first = start // depth * depth
        return np.concatenate(parts)[start - first : start - first + count]

    entry = ComputedEntry(blocks.path, "BF16", (experts, depth, out), -1, make)
    yield made, (name, f"{made}_scales"), entry


_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The values of e2m1 (OCP Microscaling Formats 1.0, section 5.3.3)."""


def _int4(entries: Mapping[str, Entry], name: str) -> _Found:
    """Yield a matrix of integers of 4 bits, eight in a word, with a scale for each group of a row: `pack-quantized` of
    the library compressed-tensors, symmetric."""
    made = name.removesuffix("_packed")
    scales = entries.get(f"{made}_scale")
    if made == name or scales is None:
        return
    packed = entries[name]
    if packed.dtype != "I32" or len(packed.shape) != 2 or len(scales.shape) != 2:
        return
    depth, words = packed.shape
    width, groups = words * 8, scales.shape[1]
    if scales.shape[0] != depth or not groups or width % groups or scales.dtype not in WIDTH:
        return

    def make(start: int, count: int, writable: bool) -> "npt.NDArray":
        import numpy as np

        assert not writable
        words_there = np.memmap(packed.path, np.uint32, "r", packed.offset + start * words * 4, (count, words))
        values = (words_there[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32) & 15).astype(np.float32) - 8
        factors = converted(scales.rows(start, count), scales.dtype, "F32")
        return converted(values.reshape(count, groups, -1) * factors[:, :, None], "F32", "BF16").reshape(count, width)

    needed = (name, f"{made}_scale", f"{made}_shape")
    yield made, needed, ComputedEntry(packed.path, "BF16", (depth, width), -1, make)
