"""The gated delta rule by chunks against the recurrence step by step, in fp64, and what it holds and takes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.plugins.gated_delta.rule import delta_rule

TOLERANCE = 1e-10


def _step_by_step(inputs: tuple[torch.Tensor, ...], ids: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, log_decay, beta, state = inputs
    outputs, last = [], torch.zeros(())
    for t in range(key.size(-2)):
        if ids is not None:
            state = state * (ids[..., t] == last)[..., None, None]
            last = ids[..., t]
        state = log_decay[..., t, :, None].exp() * state
        wanted = value[..., t, :] - (state * key[..., t, :, None]).sum(-2)
        state = state + beta[..., t, :, None] * key[..., t, :, None] * wanted[..., None, :]
        outputs.append((state * query[..., t, :, None]).sum(-2))
    return torch.stack(outputs, dim=-2), state


def _inputs(length: int, channels: int) -> Any:
    """Of 2 rows, 3 key heads, and 2 value heads of each; `channels` decays of a head."""
    torch.manual_seed(length + channels)
    of_keys, of_values = (2, 3, 1), (2, 3, 2)
    tensors = (
        torch.randn(*of_keys, length, 6),
        F.normalize(torch.randn(*of_keys, length, 6), dim=-1),
        torch.randn(*of_values, length, 5),
        -3.0 * torch.rand(*of_values, length, channels),
        torch.rand(*of_values, length, 1),
        torch.randn(*of_values, 6, 5),
    )
    return tuple(tensor.double().requires_grad_() for tensor in tensors)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("channels", [1, 6])
@pytest.mark.parametrize("length", [1, 5, 64, 65, 200])
def test_chunks_are_the_recurrence(length: int, channels: int, documents: bool) -> None:
    inputs = _inputs(length, channels)
    ids = (torch.rand(2, length) < 0.05).long().cumsum(-1)[:, None, None] if documents else None
    rule: Any = delta_rule
    ours, theirs = rule(*inputs, ids), _step_by_step(inputs, ids)
    weights = [torch.randn_like(one) for one in theirs]
    gradients = []
    for outputs in (ours, theirs):
        total = sum((one * weight).sum() for one, weight in zip(outputs, weights, strict=True) if one is not None)
        assert isinstance(total, torch.Tensor)
        gradients.append(torch.autograd.grad(total, inputs))
    for one, other in zip((*ours, *gradients[0]), (*theirs, *gradients[1]), strict=True):
        assert one is not None
        assert (one - other).abs().max() < TOLERANCE


def test_a_sequence_goes_on_from_a_state() -> None:
    *inputs, state = _inputs(150, 1)
    rule: Any = delta_rule
    whole = rule(*inputs, state)
    first = rule(*(one[..., :70, :] for one in inputs), state)
    second = rule(*(one[..., 70:, :] for one in inputs), first[1])
    assert (torch.cat((first[0], second[0]), dim=-2) - whole[0]).abs().max() < TOLERANCE
    assert (second[1] - whole[1]).abs().max() < TOLERANCE


@pytest.mark.parametrize("channels", [1, 6])
def test_decays_that_leave_nothing_are_no_numbers_beyond_all(channels: int) -> None:
    """Of exponents as small as fp32 has, nothing becomes infinite or not a number, forward or backward."""
    *inputs, state = (one.detach().float() for one in _inputs(130, channels))
    inputs[3] = torch.full_like(inputs[3], -1e4)
    leaves: Any = [one.requires_grad_() for one in (*inputs, state)]
    read, last = delta_rule(*leaves)
    assert read is not None
    gradients = torch.autograd.grad(read.sum() + last.sum(), leaves)
    assert all(one.isfinite().all() for one in (read, last, *gradients))
