"""Computes the loss, in the form that lets megatron-core average it over the tokens of the whole global batch."""

from dataclasses import dataclass

import torch
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch.distributed import ProcessGroup

from megatron_ext.errors import ConfigurationError


def token_loss(
    loss_mask: torch.Tensor, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum the losses of one microbatch, and count its tokens.

    megatron-core adds the counts over all microbatches and data-parallel ranks and divides the gradients by the
    total (`calculate_per_token_loss`), so that the mean is over tokens, never a mean of means.

    Args:
        loss_mask: [batch, sequence], 1.0 where a token's loss counts.
        losses: [batch, sequence], nats, the model's output on the last stage.
    Returns:
        The sum of the losses that count, to differentiate; how many tokens count (int); and for the log
        `{"lm loss": [sum, count]}` in fp32, to be added over microbatches and data-parallel ranks.
    """
    return summed_loss(loss_mask, torch.dot(losses.reshape(-1).float(), loss_mask.reshape(-1).float()))


def summed_loss(
    loss_mask: torch.Tensor, loss_sum: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return what `token_loss` does, of a model that was given the mask and has summed the losses itself."""
    num_tokens = loss_mask.sum()
    report = torch.stack((loss_sum.detach(), num_tokens.float()))
    return loss_sum, num_tokens.to(torch.int), {"lm loss": report}


def checked_losses(losses: object, labels_BS: torch.Tensor) -> torch.Tensor:
    """Return what a user's own loss has returned.

    Raises:
        ConfigurationError: it is not the loss of every token, [B, S], or cannot be differentiated.
    """
    batch, sequence = labels_BS.shape
    wanted = f"it must return the loss of every token, [batch, sequence] = [{batch}, {sequence}]"
    if not isinstance(losses, torch.Tensor):
        raise ConfigurationError(f"loss= returned {type(losses).__name__} and no tensor: {wanted}")
    if losses.shape != labels_BS.shape:
        average = ", and never an average: the division by the tokens of the global batch follows"
        raise ConfigurationError(f"loss= returned a tensor of shape {list(losses.shape)}: {wanted}{average}")
    if not losses.is_floating_point():
        raise ConfigurationError(f"loss= returned a tensor of {losses.dtype}: {wanted}, in fp32")
    if torch.is_grad_enabled() and not losses.requires_grad:
        raise ConfigurationError(
            "loss= returned a tensor without a gradient: compute it from token.logits_SBV, or by token's methods, and "
            "not under torch.no_grad(), nor from what detach() or item() returns"
        )
    return losses


@dataclass(frozen=True)
class TokenLogits:
    """The logits of one microbatch, for a loss of one's own. What its methods return may be differentiated.

    Shape legend: S = tokens of a sample on this context-parallel rank, B = samples, V = vocabulary of this rank.
    """

    logits_SBV: torch.Tensor
    """Logits of the part of the vocabulary that this tensor-parallel rank has; padding has the lowest number there
    is."""

    labels_BS: torch.Tensor
    """The token to predict at each position."""

    tp_group: ProcessGroup
    """Ranks that share the vocabulary, each an equal part, in the order of the ranks."""

    def cross_entropy(self) -> torch.Tensor:
        """Return -log p(label) of each token in nats, fp32 [B, S]. Collective over `tp_group`."""
        return self.log_normalizer() - self.of_labels()

    def log_normalizer(self) -> torch.Tensor:
        """Return the log of the sum of exp(logit) over the whole vocabulary, fp32 [B, S]. Collective over
        `tp_group`."""
        own_SB = torch.logsumexp(self.logits_SBV.float(), dim=-1)
        if self.tp_group.size() == 1:
            return own_SB.t()
        highest_SB = own_SB.detach().clone()
        torch.distributed.all_reduce(highest_SB, torch.distributed.ReduceOp.MAX, group=self.tp_group)
        # The reduction writes into what it is given, which the backward pass of exp still needs.
        share_SB = (own_SB - highest_SB).exp().clone()
        return (reduce_from_tensor_model_parallel_region(share_SB, self.tp_group).log() + highest_SB).t()

    def of_labels(self) -> torch.Tensor:
        """Return the logit of each token's label, fp32 [B, S]. Collective over `tp_group`."""
        size = self.logits_SBV.size(-1)
        local_SB = self.labels_BS.t() - size * self.tp_group.rank()
        here_SB = (local_SB >= 0) & (local_SB < size)
        picked_SB = self.logits_SBV.gather(-1, local_SB.clamp(0, size - 1).unsqueeze(-1)).squeeze(-1).float()
        picked_SB = torch.where(here_SB, picked_SB, 0.0).contiguous()
        if self.tp_group.size() > 1:
            picked_SB = reduce_from_tensor_model_parallel_region(picked_SB, self.tp_group)
        return picked_SB.t()
