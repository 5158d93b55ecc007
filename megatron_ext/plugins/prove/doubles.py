"""Has a whole run compute in fp64 wherever the program says fp32: the judge of differences between two layouts.

    record([*flags, "--cpu-gemm", "blas"], 4, steps, in_doubles)

Sums of two layouts are rounded in another order. Where a model amplifies that beyond a tolerance, the same runs in fp64
agree to 1e-14; where one of them computes something else, they differ as before.
"""

import gc
import io
import types
from typing import Any

DISTANCE = 1e-9
"""Tolerance between two layouts in fp64, relative to the norm of a tensor, or absolute for losses: the table of
docs/parity.md reaches 2e-14."""

UPDATE_DISTANCE = 1e-6
"""Tolerance for the last weights, relative to the distance that updates have moved them: an optimizer that divides by
the size of a gradient amplifies its rounding."""


def in_doubles() -> None:
    """Make torch.float32 another name of torch.float64 in this process, which is a rank and ends with its run. oneDNN
    multiplies no fp64: the run needs --cpu-gemm blas."""
    import torch

    single, double = torch.float32, torch.float64
    with io.BytesIO() as file:  # torch lists its types of storage once, while fp32 and fp64 are two
        torch.save(torch.zeros(1, dtype=double), file)
        file.seek(0)
        torch.load(file)
    gc.unfreeze()  # the fork server has put what it loaded out of the collector's sight
    for function in [one for one in gc.get_objects() if type(one) is types.FunctionType]:
        if function.__defaults__ and any(value is single for value in function.__defaults__):
            function.__defaults__ = tuple(double if value is single else value for value in function.__defaults__)
        for name, value in (function.__kwdefaults__ or {}).items():
            if value is single:
                function.__kwdefaults__[name] = double  # pyright: ignore[reportOptionalSubscript]
    own: Any = torch
    own.float32 = own.float = double
    own.FloatTensor = torch.DoubleTensor
    own.Tensor.float = torch.Tensor.double
    own.nn.Module.float = torch.nn.Module.double
    kind = torch.Tensor.type

    def type_(self: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        """Return the engine's name of fp32 for fp64."""
        answer = kind(self, *arguments, **options)
        return answer.replace("Double", "Float") if isinstance(answer, str) else answer

    own.Tensor.type = type_
    torch.set_default_dtype(double)
