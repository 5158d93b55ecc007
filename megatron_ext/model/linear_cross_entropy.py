"""The output layer and its cross-entropy in one operation: the logits of a microbatch never exist as a whole.

Tokens are taken in chunks. Of each chunk the logits are computed, then its loss, then at once its part of both
gradients, in the memory of the logits; only the gradients remain. So there are three matrix products, as without it,
none is repeated, and nothing is left out (Liger Kernel, arXiv:2410.10989, section 3.2, has the same order).

That is possible where the sum to differentiate is known: the loss of each token that counts, weighted here. A sum has
one number as its gradient, by which both gradients are multiplied in the backward pass.

    sum_of_losses = linear_cross_entropy(hidden, weight, labels, counts, vocabulary)

Shape legend: N tokens, C tokens of a chunk, H hidden size, V rows of the vocabulary on this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from megatron_ext.config.derived.batch_size import LOSS_CHUNKS
from megatron_ext.device.kernels import linear
from megatron_ext.device.weight_gradients import add_product_, replaces_gradient, takes_first


@dataclass(frozen=True)
class Vocabulary:
    """Says which rows of the vocabulary this rank has."""

    true_rows: int
    """Rows of this rank that are no padding; they are the first ones. Padding takes no probability."""

    group: ProcessGroup | None = None
    """Ranks that share the vocabulary, each an equal part, in the order of the ranks; None for one rank."""

    cap: float | None = None
    """Bound of the logits, as cap tanh(logits / cap)."""


def linear_cross_entropy(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    counts_N: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    chunk: int | None = None,
    into_main_grad: bool = False,
) -> torch.Tensor:
    """Return the sum over tokens of counts * -log softmax(hidden weight^T)[label], an fp32 scalar in nats.

    Collective over the vocabulary's group, one gather for each chunk. The gradient of `hidden_NH` comes from this
    rank's vocabulary rows alone, and is to be added over the group.

    Args:
        labels_N: int64, places in the whole vocabulary.
        counts_N: weight of each token's loss, 0 for one that does not count.
        chunk: tokens at a time; default by device.
        into_main_grad: add the gradient of the weight to its `main_grad`, in place of giving it to autograd.
    """
    size = chunk or LOSS_CHUNKS[hidden_NH.device.type]
    graded = torch.is_grad_enabled() and (hidden_NH.requires_grad, weight_VH.requires_grad)
    return _LinearCrossEntropy.apply(  # pyright: ignore[reportReturnType]
        hidden_NH, weight_VH, labels_N, counts_N.float(), vocabulary, size, graded or (False, False), into_main_grad
    )


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        labels_N: torch.Tensor,
        counts_N: torch.Tensor,
        vocabulary: Vocabulary,
        size: int,
        graded: tuple[bool, bool],
        into_main_grad: bool,
    ) -> torch.Tensor:
        for_hidden = torch.empty_like(hidden_NH) if graded[0] else None
        for_weight = torch.zeros_like(weight_VH, dtype=torch.float32) if graded[1] else None
        losses_N = torch.empty_like(counts_N)
        for first in range(0, len(hidden_NH), size):
            part = slice(first, first + size)
            hidden_CH, counts_C = hidden_NH[part], counts_N[part]
            logits_CV = _logits(hidden_CH, weight_VH, vocabulary)
            # Share of a gradient that passes a bound; 0 for padding is as good as any number.
            kept_CV = None if vocabulary.cap is None else 1.0 - (logits_CV / vocabulary.cap).clamp_(-1.0).square_()
            losses_N[part], grad_CV = _losses(logits_CV, labels_N[part], counts_C, vocabulary, graded=any(graded))
            if any(graded):
                grad_CV = grad_CV if kept_CV is None else grad_CV.mul_(kept_CV)
                grad_CV = grad_CV.to(hidden_NH.dtype)
            if for_hidden is not None:
                for_hidden[part] = linear(grad_CV, weight_VH.t())
            if for_weight is not None:
                add_product_(for_weight, grad_CV, hidden_CH)
            del logits_CV, kept_CV, grad_CV  # before the next ones are made
        ctx.save_for_backward(for_hidden, for_weight)
        ctx.weight, ctx.into_main_grad = weight_VH, into_main_grad
        return torch.dot(
            losses_N, counts_N
        )  # at once: a sum of sums would be as many roundings off as there are chunks

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        # They are scaled in place; a second backward pass finds them changed, and torch refuses it.
        for_hidden, for_weight = ctx.saved_tensors
        if for_hidden is not None:
            for_hidden.mul_(grad)
        if for_weight is not None and ctx.into_main_grad:
            main_grad = ctx.weight.main_grad
            sum_before = grad.new_zeros(()) if takes_first(main_grad) else main_grad
            torch.addcmul(sum_before, for_weight, grad, out=main_grad)
            for_weight = replaces_gradient(ctx.weight)
        elif for_weight is not None:
            for_weight = for_weight.mul_(grad).to(ctx.weight.dtype)
        return for_hidden, for_weight, *[None] * 6


def _logits(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Return logits in fp32; padding has the lowest fp32 number."""
    logits_CV = linear(hidden_CH, weight_VH).float()
    if vocabulary.cap is not None:
        logits_CV = logits_CV.div_(vocabulary.cap).tanh_().mul_(vocabulary.cap)
    logits_CV[:, vocabulary.true_rows :] = torch.finfo(torch.float32).min
    return logits_CV


def _losses(
    logits_CV: torch.Tensor,
    labels_C: torch.Tensor,
    counts_C: torch.Tensor,
    vocabulary: Vocabulary,
    *,
    graded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token, and the gradient of counts * losses with respect to the logits, in the memory of
    the logits."""
    rows, group = logits_CV.size(1), vocabulary.group
    local_C1 = (labels_C - (0 if group is None else rows * group.rank())).unsqueeze(1)
    here_C1 = (local_C1 >= 0) & (local_C1 < rows)
    local_C1 = local_C1.clamp(0, rows - 1)
    of_label_C1 = torch.where(here_C1, logits_CV.gather(1, local_C1), 0.0)
    highest_C1 = logits_CV.amax(1, keepdim=True)
    shares_CV = logits_CV.sub_(highest_C1).exp_()
    normalizer_C1 = shares_CV.sum(1, keepdim=True).log_().add_(highest_C1)
    if group is not None:
        normalizer_C1, of_label_C1 = _over_ranks(normalizer_C1, of_label_C1, group)
    if graded:
        counts_C1 = counts_C.unsqueeze(1)
        shares_CV.mul_((highest_C1 - normalizer_C1).exp_().mul_(counts_C1))
        shares_CV.scatter_add_(1, local_C1, -counts_C1 * here_C1)
    return (normalizer_C1 - of_label_C1).squeeze(1), shares_CV


def _over_ranks(
    normalizer_C1: torch.Tensor, of_label_C1: torch.Tensor, group: ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-sum-exp over the whole vocabulary, and each label's logit, combined from every rank's part."""
    own = torch.cat((normalizer_C1, of_label_C1), 1)
    gathered = own.new_empty(group.size() * len(own), 2)
    torch.distributed.all_gather_into_tensor(gathered, own, group=group)
    all_RC2 = gathered.view(group.size(), len(own), 2)
    return all_RC2[..., :1].logsumexp(0), all_RC2[..., 1:].sum(0)
