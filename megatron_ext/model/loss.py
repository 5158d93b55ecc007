"""Computes the loss, in the form that lets megatron-core average it over the tokens of the whole global batch."""

import torch


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
    loss_sum = torch.dot(losses.reshape(-1).float(), loss_mask.reshape(-1).float())
    num_tokens = loss_mask.sum()
    report = torch.stack((loss_sum.detach(), num_tokens.float()))
    return loss_sum, num_tokens.to(torch.int), {"lm loss": report}
