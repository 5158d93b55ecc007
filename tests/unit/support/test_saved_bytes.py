"""Bytes that autograd holds for the backward pass, counted in a small graph."""

import torch

from tests.support.saved_bytes import HeldForBackward, bytes_held_for_backward


def test_what_a_graph_holds_counts_each_storage_but_the_known_ones() -> None:
    weight, inputs = torch.zeros(8, 8, requires_grad=True), torch.zeros(4, 8)

    def forward() -> torch.Tensor:
        hidden = inputs @ weight
        return (hidden * hidden).exp().sum()

    assert bytes_held_for_backward(forward, [weight, inputs]) == 128 + 128  # hidden, once, and the exponentials
    assert bytes_held_for_backward(forward, [weight]) == 128 + 128 + 128  # and the inputs, for the weight's gradient


def test_the_most_that_is_held_is_that_of_all_microbatches_in_flight() -> None:
    weight = torch.zeros(8, 8, requires_grad=True)

    def loss(rows: int) -> torch.Tensor:
        hidden = torch.zeros(rows, 8) @ weight
        return (
            (hidden * hidden).exp().sum()
        )  # the inputs, the hidden states (held twice, counted once), the exponentials

    each = 3 * 128
    with HeldForBackward([weight]) as held:
        losses = [loss(4) for _ in range(3)]
        assert held.now == held.most == 3 * each
        losses.pop().backward()
        assert (held.now, held.most) == (2 * each, 3 * each)
        losses.append(loss(2))
        assert (held.now, held.most) == (2 * each + each // 2, 3 * each)
        losses.clear()
        assert (held.now, held.most) == (0, 3 * each)
