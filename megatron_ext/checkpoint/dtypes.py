"""Dtypes of saved tensors: their names in safetensors, torch and numpy, the bytes of an element, and the conversion of
weights from one to another. No torch here, and numpy where it is needed.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy.typing as npt

WIDTHS = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32", "complex32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of an element, by torch's name, of every dtype that a checkpoint may hold."""

_IN_SAFETENSORS = {
    **{"BOOL": "bool", "U8": "uint8", "I8": "int8", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"},
    **{"I16": "int16", "U16": "uint16", "F16": "float16", "BF16": "bfloat16"},
    **{"I32": "int32", "U32": "uint32", "F32": "float32", "I64": "int64", "U64": "uint64", "F64": "float64"},
}
SAFETENSORS_WIDTHS = {code: WIDTHS[name] for code, name in _IN_SAFETENSORS.items()}
"""Bytes of an element, by the name in safetensors, of every dtype that such a file may hold."""

DTYPES = {code: _IN_SAFETENSORS[code] for code in ("F64", "F32", "F16", "BF16")}
"""The dtypes of weights: torch's name by that in safetensors. What has another dtype is read by nobody here."""

WIDTH = {code: WIDTHS[name] for code, name in DTYPES.items()}
"""Bytes of an element of weights, by the dtype's name in safetensors."""


def code_of(name: str) -> str:
    """Return the name in safetensors of a dtype of weights, from torch's name; torch's own for other dtypes."""
    return next((code for code, theirs in DTYPES.items() if theirs == name), name)


ARRAYS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "uint16"}
"""numpy's dtype of the elements of weights, by the dtype's name in safetensors; bfloat16 are uint16."""


def converted(values: "npt.NDArray", source: str, target: str, added: float = 0.0) -> "npt.NDArray":
    """Return the array, with a number `added` to every element, rounded to the nearest, ties to even, as torch does; to
    16 bits by way of fp32.

    Overflow is infinite, and NaN stays NaN.
    """
    import numpy as np

    if added:
        wide = "F64" if "F64" in (source, target) else "F32"
        return converted(converted(values, source, wide) + np.dtype(ARRAYS[wide]).type(added), wide, target)
    if source == target:
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        if source == "BF16":
            values = (values.astype(np.uint32) << 16).view(np.float32)
        if target == "F64":
            return values.astype(np.float64)
        values = np.ascontiguousarray(values).astype(np.float32, copy=False)
        if target != "BF16":
            return values.astype(ARRAYS[target], copy=False)
    bits = values.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
