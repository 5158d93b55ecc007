"""Gives the memory of an output that was computed anew to the one that was freed, without building anything.

--recompute-modules layernorm frees the outputs of norms (megatron-core's `CheckpointWithoutOutput`). In the backward
pass megatron-core lets a freed tensor share the memory of the new one by a few lines of C++, which torch compiles when
they are called first: on every new machine, with ninja and a C++ compiler. Where one of them is missing the first
backward pass would fail; there the numbers are copied, the same bits in one more pass over memory.
"""

import os
import shutil
from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import random
from torch.utils import cpp_extension


def copy_where_nothing_can_be_built() -> None:
    """Have megatron-core copy, on a machine without ninja or a C++ compiler. Call it before a model is trained."""
    compiler = os.environ.get("CXX", "c++")  # as torch chooses it
    if not (cpp_extension.is_ninja_available() and shutil.which(compiler)):
        random._get_share_storage = _copies


def _copies() -> Callable[[torch.Tensor, torch.Tensor], None]:
    return _copy


def _copy(freed: torch.Tensor, computed: torch.Tensor) -> None:
    """Give `freed`, and every view of its memory, the numbers of `computed`, which autograd takes for no change."""
    memory = computed.untyped_storage()
    freed.untyped_storage().resize_(memory.nbytes())
    freed.untyped_storage().copy_(memory)
