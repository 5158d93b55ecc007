"""Holds weights as numpy arrays, and converts them from one dtype to another, without torch. bfloat16 are uint16."""

import numpy as np
import numpy.typing as npt

ARRAYS: dict[str, type[np.generic]] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
"""numpy's dtype of the elements, by the dtype's name in safetensors."""


def converted(values: npt.NDArray, source: str, target: str, added: float = 0.0) -> npt.NDArray:
    """Return the array, with a number `added` to every element, rounded to the nearest, ties to even, as torch does; to
    16 bits by way of fp32.

    Overflow is infinite, and NaN stays NaN.
    """
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
