"""The hash of a tensor's bits: another for every flip of one."""

import pytest
import torch

from megatron_ext.plugins.silent_errors import weight_hash as weight_hash_module
from megatron_ext.plugins.silent_errors.weight_hash import weight_hash


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_every_bit_counts(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_hash_module, "_WORDS_AT_ONCE", 4)
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
    data, seen = tensor.view(torch.uint8), {int(weight_hash(tensor))}
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            seen.add(int(weight_hash(tensor)))
            data[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(data)


def test_two_flips_do_not_cancel() -> None:
    tensor = torch.randn(64, generator=torch.Generator().manual_seed(0))
    known = int(weight_hash(tensor))
    for bit in (0, 15, 31):
        for first in range(63):
            for second in range(first + 1, 64):
                changed = tensor.clone()
                changed.view(torch.int32)[[first, second]] ^= torch.tensor(1 << bit).to(torch.int32)
                assert int(weight_hash(changed)) != known


def test_order_counts_within_and_between_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_hash_module, "_WORDS_AT_ONCE", 4)
    words = torch.arange(16, dtype=torch.float64)
    assert len({int(weight_hash(words.roll(shift))) for shift in range(16)}) == 16


def test_place_and_strides_do_not_count() -> None:
    tensor = torch.randn(6, 5)
    shifted = torch.cat([torch.zeros(1), tensor.flatten()])[1:].view(6, 5)
    for same in (tensor.clone(), shifted, tensor.t().contiguous().t()):
        assert int(weight_hash(same)) == int(weight_hash(tensor))
    assert int(weight_hash(torch.empty(0))) == 0
