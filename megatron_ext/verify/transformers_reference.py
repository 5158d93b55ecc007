"""What transformers computes with an exported folder.

It runs in a process of its own, and imports nothing of ours: what the device room replaces in torch leaves the rotary
tables of transformers unfilled, and loading megatron-core takes longer than the comparison.
"""

import sys
from collections.abc import Callable

import torch

_BATCH = 8


def their_logits(folder: str, tokens: list[list[int]]) -> torch.Tensor:
    """Return the logits [batch, sequence, vocabulary] in fp32, by transformers. No code from the folder is run."""
    return _their_model(folder)(torch.tensor(tokens))


def their_loss(folder: str, tokens: list[list[int]]) -> float:
    """Return `mean_loss` of transformers' model."""
    return mean_loss(_their_model(folder), torch.tensor(tokens))


def use_plain_torch() -> None:
    """Hide packages of GPU kernels from transformers, which calls them for tensors in host memory, too (5.23). It must
    not have been imported yet."""
    for package in ("fla", "mamba_ssm", "causal_conv1d"):
        sys.modules[package] = None  # pyright: ignore[reportArgumentType]


def _their_model(folder: str) -> Callable[[torch.Tensor], torch.Tensor]:
    use_plain_torch()
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).eval()

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=tokens).logits

    return logits


def mean_loss(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> float:
    """Return the mean loss per token, in nats, of predicting each of `tokens` [samples, length + 1] but the first."""
    total = 0.0
    for rows in tokens.split(_BATCH):
        logits = model(rows[:, :-1])
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="none"
        )
        total += losses.double().sum().item()
    return total / tokens[:, 1:].numel()
