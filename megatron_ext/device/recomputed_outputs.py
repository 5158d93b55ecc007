"""Gives the memory of a recomputed output to the freed output, with a small C++ extension or none.

--recompute-modules layernorm frees the outputs of norms (megatron-core's `CheckpointWithoutOutput`). In the backward
pass megatron-core lets a freed tensor share the memory of the new one by a few lines of C++, which torch compiles when
they are called first: on every new machine, with ninja and a C++ compiler, and with all headers of torch, half a minute
of a core. Ours take the addresses that Python knows and need one small header: a second or two. With
megatron-core's lines the first backward pass fails on a machine without ninja or a compiler; ours then copies the
numbers, the same bits in one more pass over memory.
"""

import ctypes
import functools
import os
import shutil
from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import random
from torch.utils import cpp_extension

Sharing = Callable[[torch.Tensor, torch.Tensor], None]
"""Type of the function that gives a freed tensor the memory of a recomputed one."""

_SHARE = """
#include <c10/core/Storage.h>

extern "C" void megatron_ext_share_storage(void* freed, void* computed) {
  auto* to = static_cast<c10::StorageImpl*>(freed);
  auto* from = static_cast<c10::StorageImpl*>(computed);
  // Kept as long as the memory is in use by `freed`, and one of its views.
  auto* kept = new c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(from));
  to->set_data_ptr(c10::DataPtr(
      kept->data_ptr().get(), kept, [](void* context) { delete static_cast<c10::Storage*>(context); }, from->device()));
  to->set_nbytes(from->nbytes());
}
"""


def share_or_copy() -> None:
    """Have megatron-core call our few lines of C++, or copy where they cannot be built. Call it before training."""
    compiler = os.environ.get("CXX", "c++")  # as torch chooses it
    can_build = cpp_extension.is_ninja_available() and shutil.which(compiler) is not None
    random._get_share_storage = _built if can_build else _copies


@functools.cache
def _built() -> Sharing:
    """Compile the extension, unless a process of this machine already has, and load it."""
    file = cpp_extension.load_inline(
        "megatron_ext_share_storage", _SHARE, no_implicit_headers=True, is_python_module=False
    )
    share = ctypes.CDLL(str(file)).megatron_ext_share_storage
    share.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    share.restype = None

    def shared(freed: torch.Tensor, computed: torch.Tensor) -> None:
        share(freed.untyped_storage()._cdata, computed.untyped_storage()._cdata)

    return shared


def _copies() -> Sharing:
    return _copy


def _copy(freed: torch.Tensor, computed: torch.Tensor) -> None:
    """Give `freed`, and every view of its memory, the numbers of `computed`, which autograd takes for no change."""
    memory = computed.untyped_storage()
    freed.untyped_storage().resize_(memory.nbytes())
    freed.untyped_storage().copy_(memory)
