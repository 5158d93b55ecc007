"""The output layer with its cross-entropy, against the same in float64, and that the logits never are whole."""

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext.device.weight_gradients import expect_first
from megatron_ext.model import linear_cross_entropy as module
from megatron_ext.model.linear_cross_entropy import Vocabulary, linear_cross_entropy
from megatron_ext.model.loss import capped

TOKENS, HIDDEN, ROWS, TRUE_ROWS = 50, 24, 96, 83
BOUNDS = {torch.float32: (2e-7, 2e-6), torch.bfloat16: (2e-4, 8e-3)}
"""By dtype: error of the loss over the loss, and norm of a gradient's error over the gradient's norm."""


def inputs(dtype: torch.dtype, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight, labels, and which tokens count."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).mul(scale).to(dtype)
    weight = torch.randn(ROWS, HIDDEN, generator=generator).to(dtype)
    labels = torch.randint(0, TRUE_ROWS, (TOKENS,), generator=generator)
    counts = (torch.rand(TOKENS, generator=generator) < 0.7).float()
    return hidden.requires_grad_(), weight.requires_grad_(), labels, counts


def exact(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, counts: torch.Tensor, cap: float | None = None
) -> Any:
    """Loss and both gradients in float64, padding left out."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    losses = F.cross_entropy(capped(hidden @ weight[:TRUE_ROWS].t(), cap), labels, reduction="none")
    loss = (losses * counts).sum()
    return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.detach().double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("chunk", "cap"), [(1, None), (7, None), (25, None), (50, None), (None, None), (7, 4.0)])
def test_loss_and_gradients_are_exact(dtype: torch.dtype, chunk: int | None, cap: float | None) -> None:
    """Chunks of 7 do not divide the tokens; a gradient of 3 scales both."""
    given = inputs(dtype)
    loss = linear_cross_entropy(*given, Vocabulary(TRUE_ROWS, cap=cap), chunk=chunk)
    for_hidden, for_weight = torch.autograd.grad(loss * 3.0, given[:2])
    assert (loss.dtype, for_hidden.dtype, for_weight.dtype) == (torch.float32, dtype, dtype)
    of_loss, of_gradient = BOUNDS[dtype]
    expected = exact(*given, cap)
    assert error(loss, expected[0]) < of_loss
    assert error(for_hidden / 3.0, expected[1]) < of_gradient
    assert error(for_weight / 3.0, expected[2]) < of_gradient
    assert not for_weight[TRUE_ROWS:].any()
    assert not for_hidden[given[3] == 0].any()


def test_a_label_without_probability_has_its_loss() -> None:
    """Its share of the softmax is 0 in fp32."""
    given = inputs(torch.float32, scale=200.0)
    loss = linear_cross_entropy(*given, Vocabulary(TRUE_ROWS), chunk=16)
    expected = exact(*given)
    assert float(expected[0]) > 100 * TOKENS
    assert error(loss, expected[0]) < 1e-6
    assert error(torch.autograd.grad(loss, given[1])[0], expected[2]) < 1e-5


def test_only_what_is_asked_for_is_computed() -> None:
    hidden, weight, labels, counts = inputs(torch.float32)
    vocabulary = Vocabulary(TRUE_ROWS)
    loss = linear_cross_entropy(hidden, weight, labels, counts, vocabulary)
    (alone,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), labels, counts, vocabulary), hidden)
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(hidden, weight, labels, counts, vocabulary), loss)
    nothing = linear_cross_entropy(hidden, weight, labels, torch.zeros(TOKENS), vocabulary)
    assert nothing == 0
    assert not torch.autograd.grad(nothing, weight)[0].any()
    loss.backward(retain_graph=True)
    assert torch.equal(alone, hidden.grad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("main", [torch.float32, torch.bfloat16], ids=str)
def test_the_main_gradient_gets_it_directly(main: torch.dtype) -> None:
    """On top of what it holds; autograd adds nothing where its own is asked for (tied embeddings)."""
    given = inputs(torch.bfloat16)
    weight: Any = given[1]
    weight.main_grad, weight.grad_added_to_main_grad, weight.zero_out_wgrad = torch.ones(ROWS, HIDDEN).to(main), 0, True
    (3.0 * linear_cross_entropy(*given, Vocabulary(TRUE_ROWS), into_main_grad=True)).backward()  # a loss scale
    assert weight.grad_added_to_main_grad is True
    assert not weight.grad.any()
    assert error(weight.main_grad, 3.0 * exact(*given)[2] + 1.0) < BOUNDS[torch.bfloat16][1]

    def twice(main_grad: torch.Tensor) -> torch.Tensor:
        weight.main_grad = main_grad
        for _ in range(2):
            (3.0 * linear_cross_entropy(*given, Vocabulary(TRUE_ROWS), into_main_grad=True)).backward()
        return main_grad

    over = torch.full((ROWS, HIDDEN), float("nan")).to(main)
    expect_first(over)
    bits = torch.int32 if main == torch.float32 else torch.int16
    assert torch.equal(twice(over).view(bits), twice(torch.zeros(ROWS, HIDDEN).to(main)).view(bits)), "written, added"


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("chunk", [5, 50])
def test_logits_are_never_whole(chunk: int) -> None:
    given = inputs(torch.float32)
    with Largest() as largest:
        linear_cross_entropy(*given, Vocabulary(TRUE_ROWS), chunk=chunk).backward()
    assert largest.elements == max(chunk * ROWS, ROWS * HIDDEN)


def test_one_chunk_of_logits_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the chunk before are gone when the next ones are made, with what was made of them."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    genuine = module._logits

    def watched(*given: Any) -> torch.Tensor:
        alive.append(sum(reference() is not None for reference in made))
        logits = genuine(*given)
        made.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(module, "_logits", watched)
    hidden, weight = torch.randn(12, 8, requires_grad=True), torch.randn(16, 8, requires_grad=True)
    labels = torch.zeros(12, dtype=torch.int64)
    linear_cross_entropy(hidden, weight, labels, torch.ones(12), Vocabulary(16), chunk=4).backward()
    assert alive == [0, 0, 0]


def test_the_gradient_of_many_chunks_is_rounded_once() -> None:
    """512 tokens of one kind: in 16 bits their sum would end where one more changes nothing."""
    hidden = torch.ones(512, 4, dtype=torch.bfloat16)
    weight = torch.zeros(8, 4, dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(
        hidden, weight, torch.zeros(512, dtype=torch.int64), torch.ones(512), Vocabulary(8), chunk=1
    ).backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [-448.0] + [64.0] * 7
