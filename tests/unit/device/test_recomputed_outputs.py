"""Outputs that are freed and computed anew (--recompute-modules layernorm), where C++ can be compiled and where not."""

import os
import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random
from torch.utils import cpp_extension

from megatron_ext.device.recomputed_outputs import _copy, share_or_copy

ENGINES_OWN = random._get_share_storage  # before a run of another test in this process replaces it


def gradients(*, freed: bool) -> list[torch.Tensor]:
    """Those of x and of the weights of a norm and of a product after it, which reads a view of the norm's output."""
    x, norm, matrix = (torch.linspace(-1.0, 2.0, n).view(shape) for n, shape in ((24, (6, 4)), (4, (4,)), (12, (3, 4))))
    inputs = [tensor.requires_grad_() for tensor in (x, norm, matrix)]

    def normed(x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (4,), norm)

    kept: Any = tensor_parallel.CheckpointWithoutOutput(fp8=None)  # pyright: ignore[reportArgumentType]
    output = kept.checkpoint(normed, x) if freed else normed(x)
    product = F.linear(output.view(2, 3, 4), matrix)
    if freed:
        kept.discard_output_and_register_recompute(product)
        assert output.untyped_storage().nbytes() == 0
    product.square().sum().backward()
    return [tensor.grad for tensor in inputs if tensor.grad is not None]


@pytest.mark.parametrize("missing", ["ninja", "a compiler"])
def test_norms_are_computed_anew_without_ninja_or_a_compiler(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**_given: Any) -> None:
        raise RuntimeError("Ninja is required to load C++ extensions")

    monkeypatch.setattr(random, "load_inline", build)
    monkeypatch.setattr(random, "_share_storage_ext", None)
    monkeypatch.setattr(random, "_get_share_storage", ENGINES_OWN)
    with pytest.raises(RuntimeError, match="Ninja is required"):
        gradients(freed=True)
    monkeypatch.setattr(cpp_extension, "is_ninja_available", lambda: missing != "ninja")
    monkeypatch.setattr(shutil, "which", lambda _name: None if missing == "a compiler" else "/usr/bin/c++")
    share_or_copy()
    for here, there in zip(gradients(freed=True), gradients(freed=False), strict=True):
        assert torch.equal(here, there)


@pytest.mark.skipif(
    not cpp_extension.is_ninja_available() or shutil.which(os.environ.get("CXX", "c++")) is None,
    reason="needs ninja and a C++ compiler",
)
def test_where_it_can_be_built_the_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not copied; it stays when the computed tensor is gone, and ends with the last reader."""

    def build(**_given: Any) -> None:
        raise AssertionError("megatron-core's own is built with all headers of torch")

    monkeypatch.setattr(random, "load_inline", build)
    monkeypatch.setattr(random, "_share_storage_ext", None)
    monkeypatch.setattr(random, "_get_share_storage", ENGINES_OWN)
    share_or_copy()
    for here, there in zip(gradients(freed=True), gradients(freed=False), strict=True):
        assert torch.equal(here, there)

    share: Any = random._get_share_storage()
    freed, computed = torch.zeros(20), torch.arange(20.0)
    view, storage = freed.view(4, 5), computed.untyped_storage()
    before = owners(storage)
    freed.untyped_storage().resize_(0)
    share(freed, computed)
    assert freed.data_ptr() == view.data_ptr() == computed.data_ptr()
    assert freed.untyped_storage().nbytes() == storage.nbytes()
    assert owners(storage) == before + 1
    del freed
    assert owners(storage) == before + 1
    del view
    assert owners(storage) == before


def test_a_copy_is_of_the_whole_memory_that_a_part_lies_in() -> None:
    """The computed tensor may be a view, as the freed one was of memory that is laid out alike."""
    computed, freed = torch.arange(6.0)[2:4], torch.zeros(6)[2:4]
    freed.untyped_storage().resize_(0)
    _copy(freed, computed)
    assert freed.tolist() == [2.0, 3.0]


def owners(storage: torch.UntypedStorage) -> int:
    return torch._C._storage_Use_Count(storage._cdata)  # pyright: ignore[reportAttributeAccessIssue]
