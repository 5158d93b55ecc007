"""Computes logits and losses of an exported folder with transformers, as a reference.

It runs in a process of its own, and imports no module of megatron_ext: the functions of torch that megatron_ext.device
replaces would leave the rotary tables of transformers unfilled, and loading megatron-core takes longer than the
comparison.
"""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

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
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    # Of a model with a text model inside of it, the whole.
    made = AutoModelForCausalLM if config.get_text_config() is config else AutoModelForMultimodalLM
    model = made.from_pretrained(folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False).eval()

    # An indexer's scores can be equal (a ReLU makes zeros): topk takes any of them, so that the logits of a text change
    # when tokens follow it (transformers 5.23).
    chooses_keys = getattr(model.config, "index_topk", None) is not None

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), EarliestOfEquals() if chooses_keys else contextlib.nullcontext():
            return model(input_ids=tokens).logits

    return logits


class EarliestOfEquals(TorchFunctionMode):
    """Takes the earliest of equal elements wherever torch's topk would take any of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the function's result, or for topk the first values and indices of a stable sort."""
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        values, k, *rest = args if len(args) > 1 else (*args, kwargs["k"])
        dim = rest[0] if rest else kwargs.get("dim", -1)
        ordered = values.sort(dim=dim, descending=kwargs.get("largest", True), stable=True)
        highest, indices = (part.narrow(dim, 0, k) for part in ordered)
        return torch.return_types.topk((highest, indices))


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
