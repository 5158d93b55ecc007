"""The operations that benchmarks/operations.py measures, each with its plain reference."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

HIDDEN, FFN, VOCABULARY, PADDED = 768, 3072, 50_257, 50_304

Inputs = Sequence[torch.Tensor]
Results = list[torch.Tensor]
Operation = Callable[..., Results]


@dataclass(frozen=True)
class Pair:
    """One operation.

    Attributes:
        inputs: makes what it is given, for a number of tokens, in fp32.
        plain: computes it with torch's own operations, from inputs in float64 as well.
        others: name -> what else computes it.
        dtype: of the floating-point inputs.
    """

    inputs: Callable[[int], Inputs]
    plain: Operation
    others: dict[str, Operation]
    dtype: torch.dtype = torch.float32

    def names(self) -> list[str]:
        """Return the names of all contestants."""
        return ["plain", *self.others]

    def call(self, which: str, tokens: int) -> Callable[[], Results]:
        """Return a call that computes results and gradients; "float64" is the plain reference of the same inputs."""
        dtype = torch.float64 if which == "float64" else self.dtype
        rounded = [value.to(self.dtype) if value.is_floating_point() else value for value in self.inputs(tokens)]
        given = [value.to(dtype) if value.is_floating_point() else value for value in rounded]
        operation = self.others.get(which, self.plain)
        return lambda: operation(*given)


def differentiated(function: Callable[..., torch.Tensor], leaves: int) -> Operation:
    """Return what computes a function, and the gradients of the sum of its result by its first arguments."""

    def results(*given: torch.Tensor) -> Results:
        inputs = [value.detach().requires_grad_(i < leaves) for i, value in enumerate(given)]
        result = function(*inputs)
        result.sum().backward()
        return [result.detach(), *(leaf.grad for leaf in inputs if leaf.grad is not None)]

    return results


def _head_inputs(width: int) -> Callable[[int], Inputs]:
    """Return what makes hidden states of this width, an output layer, and labels."""

    def inputs(tokens: int) -> Inputs:
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, width, generator=generator)
        weight = torch.randn(PADDED, width, generator=generator).mul_(0.02)
        return hidden, weight, torch.randint(0, VOCABULARY, (tokens,), generator=generator)

    return inputs


def _plain_head(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss as the model does without --linear-cross-entropy."""
    from megatron_ext.device.kernels import linear

    logits = linear(hidden, weight[:VOCABULARY])
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    return F.cross_entropy(logits, labels, reduction="none").sum()


def _fused_head(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, *, chunk: int | None = None
) -> torch.Tensor:
    from megatron_ext.model.linear_cross_entropy import Vocabulary, linear_cross_entropy

    counts = torch.ones(len(labels))
    return linear_cross_entropy(hidden, weight, labels, counts, Vocabulary(VOCABULARY), chunk=chunk)


def _fused_head_into_main_grad(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> Results:
    """Compute it as with --gradient-accumulation-fusion; the main gradient is there before."""
    from megatron_ext.model.linear_cross_entropy import Vocabulary, linear_cross_entropy

    inputs = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
    inputs[1].main_grad = _main_gradient(weight).zero_()  # pyright: ignore[reportAttributeAccessIssue]
    vocabulary = Vocabulary(VOCABULARY)
    counts = torch.ones(len(labels))
    loss = linear_cross_entropy(inputs[0], inputs[1], labels, counts, vocabulary, into_main_grad=True)
    loss.backward()
    return [loss.detach(), inputs[0].grad, inputs[1].main_grad]  # pyright: ignore


_MAIN: dict[tuple[int, ...], torch.Tensor] = {}


def _main_gradient(weight: torch.Tensor) -> torch.Tensor:
    """Return a buffer that outlives the call, as that of data parallelism does."""
    key = tuple(weight.shape)
    if key not in _MAIN:
        _MAIN[key] = torch.zeros(key)
    return _MAIN[key]


def _torchs_head(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute it as torch does, where it can; it knows no padding."""
    return F.linear_cross_entropy(hidden, weight[:VOCABULARY], labels, reduction="sum")  # pyright: ignore


def _heads() -> dict[str, Operation]:
    found = {"fused": differentiated(_fused_head, 2), "fused, into the main gradient": _fused_head_into_main_grad}
    if hasattr(F, "linear_cross_entropy"):
        found["F.linear_cross_entropy"] = differentiated(_torchs_head, 2)
    return found


def chunked_name(chunk: int) -> str:
    """Return the contestant's name for so many tokens at a time."""
    return f"fused, {chunk} at a time"


def sized_head(width: int, chunks: Sequence[int]) -> Pair:
    """Return the output layer of one width with its loss in fp32, fused as by default and by chunks of other sizes."""
    by_size = {chunked_name(chunk): differentiated(functools.partial(_fused_head, chunk=chunk), 2) for chunk in chunks}
    fused = {"fused": differentiated(_fused_head, 2), **by_size}
    return Pair(_head_inputs(width), differentiated(_plain_head, 2), fused)


def head_bytes(tokens: int, width: int, chunk: int) -> int:
    """Return the least that the fused head needs in fp32: both gradients, and the logits of one chunk."""
    return 4 * (tokens * width + PADDED * width + min(chunk, tokens) * PADDED)


def _product_inputs(tokens: int) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, generator=generator) for size in ((tokens, FFN), (tokens, HIDDEN))]


def _product_then_sum(grad: torch.Tensor, x: torch.Tensor) -> Results:
    """Add a weight gradient as a linear layer and the hook of data parallelism do: the product, then the sum."""
    from megatron_ext.device.kernels import linear

    main = torch.ones(FFN, HIDDEN, dtype=torch.promote_types(grad.dtype, torch.float32))
    return [main.add_(linear(grad.t(), x.t()))]


def _summing_product(grad: torch.Tensor, x: torch.Tensor) -> Results:
    from megatron_ext.device.weight_gradients import add_product_

    main = torch.ones(FFN, HIDDEN)
    add_product_(main, grad, x)
    return [main]


def _norm_inputs(tokens: int) -> Inputs:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(tokens, HIDDEN, generator=generator), torch.rand(HIDDEN, generator=generator) + 0.5


def _plain_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (HIDDEN,), weight, 1e-5)


def _our_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    from megatron_ext.device.kernels import rms_norm

    return rms_norm(x, weight, 1e-5)


_SUM = {"in the product": _summing_product}
_NORM = {"ours": differentiated(_our_norm, 2)}

PAIRS = {
    "output layer and loss": Pair(_head_inputs(HIDDEN), differentiated(_plain_head, 2), _heads()),
    "output layer and loss, bf16": Pair(_head_inputs(HIDDEN), differentiated(_plain_head, 2), _heads(), torch.bfloat16),
    "sum of weight gradients": Pair(_product_inputs, _product_then_sum, _SUM),
    "sum of weight gradients, bf16": Pair(_product_inputs, _product_then_sum, _SUM, torch.bfloat16),
    "RMSNorm": Pair(_norm_inputs, differentiated(_plain_norm, 2), _NORM),
}
