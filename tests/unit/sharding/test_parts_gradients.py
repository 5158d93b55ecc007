"""Gradients of a real small run that the norm leaves out, and those that the update uses."""

import torch

from megatron_ext.sharding.parts import gradients_of_update, outside_norm
from megatron_ext.train.run import Run
from megatron_ext.train.step import compute_gradients
from tests.support.small_runs import built


def _weight(run: Run, ending: str) -> torch.nn.Parameter:
    [weight] = [one for chunk in run.chunks for name, one in chunk.named_parameters() if name.endswith(ending)]
    return weight


def _outside(run: Run) -> list[int]:
    return [gradient.data_ptr() for gradient in outside_norm(run.optimizer)]


def test_copies_that_another_rank_counts_are_outside_of_the_norm() -> None:
    """The engine marks them. What is left out is remembered, and found anew where other weights have a gradient."""
    with built() as run:
        copy, other = _weight(run, "final_layernorm.weight"), _weight(run, "final_layernorm.bias")
        for marked in (copy, other):
            marked.shared = True  # pyright: ignore[reportAttributeAccessIssue]
        compute_gradients(run, range(4))
        run.optimizer.prepare_grads()
        mains = {
            id(weight): main for part in run.sharding.parts(run.optimizer) for weight, main in part.main_parameters()
        }
        copy, other = mains[id(copy)], mains[id(other)]
        assert copy.grad is not None
        assert other.grad is not None
        of_both = [copy.grad.data_ptr(), other.grad.data_ptr()]
        assert sorted(_outside(run)) == sorted(of_both)
        assert sorted(_outside(run)) == sorted(of_both), "remembered"
        gradient, other.grad = other.grad, None
        assert _outside(run) == [copy.grad.data_ptr()]
        other.grad = gradient
        assert sorted(_outside(run)) == sorted(of_both)
        copy.grad = copy.grad.clone()
        assert copy.grad.data_ptr() in _outside(run), "that of the next step"
        for absent, there in ((copy, other), (other, copy)):  # as many have a gradient, and others: layers take turns
            gradient, absent.grad = absent.grad, None
            assert there.grad is not None
            assert _outside(run) == [there.grad.data_ptr()]
            absent.grad = gradient


def test_weights_without_a_gradient_are_not_updated() -> None:
    with built() as run:
        compute_gradients(run, range(4))
        run.optimizer.prepare_grads()
        parts = run.sharding.parts(run.optimizer)
        everything = [id(weight) for weight, _ in gradients_of_update(parts)]
        assert len(everything) == len(list(run.chunks[0].parameters()))
        weight, main = next(iter(parts[0].main_parameters()))
        main.grad = None
        assert [id(one) for one, _ in gradients_of_update(parts)] == [one for one in everything if one != id(weight)]
