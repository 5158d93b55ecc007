"""The loss scale of a run: one number, by which the mean loss of the global batch is multiplied before its backward
pass, so that gradients do not vanish in fp16 (Micikevicius et al. 2018, arXiv:1710.03740, section 3.2).

The loss of a microbatch is a sum over its tokens, and its divisor is known only after the backward pass
(model/loss.py). A scale of the sum would overflow fp16 where one of the mean, which Megatron-LM's flags give, is far
from it. So the sum is divided beforehand by the number of tokens in the global batch, which is the same in every
layout; what the loss masks leave out of them is made up for after the reduction.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer.grad_scaler import MegatronGradScaler
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection

_OF_MEAN = "of_mean"
"""Mark of a saved scale that belongs to the mean loss; earlier ones belong to the sum over the global batch."""


class LossScale:
    """The loss scale of all optimizers of a run, in the place of the scaler that megatron-core gives each of them.

    With experts of their own ranks there are two optimizers. Each unscales its gradients, and reports whether they
    overflowed; the scale changes when all have reported, by one decision.

    Args:
        scaler: megatron-core's scaler, which has the first scale and decides on the next.
        optimizers: number of optimizers that report.
    """

    def __init__(self, scaler: MegatronGradScaler, optimizers: int):
        self._scaler: Any = scaler
        self._optimizers = optimizers
        self._reports: list[bool] = []
        self._trial: torch.Tensor | None = None
        self.tokens = 1
        """Tokens of the global batch, those that do not count in the loss included. Set it before each step."""

    @property
    def scale(self) -> torch.Tensor:
        """The scale, fp32 [1]."""
        return self._scaler.scale if self._trial is None else self._trial

    @property
    def inv_scale(self) -> torch.Tensor:
        """Factor by which the optimizers multiply gradients, fp32 [1]."""
        return self.scale.double().reciprocal().float()

    def update(self, found_inf: bool) -> None:
        """Take the report of one optimizer, under megatron-core's name."""
        self._reports.append(found_inf)
        if len(self._reports) == self._optimizers:
            if self._trial is None:
                self._scaler.update(any(self._reports))
            self._reports.clear()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of a microbatch's losses, or the scale of an auxiliary one, as the backward pass begins with
        it."""
        return loss * (self.scale / self.tokens)

    def finalize(
        self,
        model: Sequence[Any],
        num_tokens: torch.Tensor,
        pg_collection: ProcessGroupCollection,
        force_all_reduce: bool = False,
    ) -> None:
        """Reduce the gradients as megatron-core does, and turn them into gradients of the mean loss over the tokens
        that count, times the scale. Collective.

        megatron-core itself would divide the gradients by all tokens, which in 16 bits would leave nothing.

        Args:
            model: the chunks.
            num_tokens: how many tokens of this rank count, int; 0 on all stages but the last.
        """
        finalize_model_grads(list(model), None, pg_collection=pg_collection, force_all_reduce=force_all_reduce)
        stages = pg_collection.pp
        torch.distributed.broadcast(num_tokens, group=stages, group_src=stages.size() - 1)
        torch.distributed.all_reduce(num_tokens, group=pg_collection.dp_cp)
        share = self.tokens / num_tokens.clamp(min=1)
        for chunk in model:
            chunk.scale_gradients(share)

    @contextmanager
    def tried(self, scale: float) -> Iterator[None]:
        """Return a context with another scale, in which overflows change nothing."""
        self._trial = torch.full_like(self._scaler.scale, scale)
        try:
            yield
        finally:
            self._trial = None

    def state_dict(self) -> dict[str, float | int]:
        """Return the scaler's state for a checkpoint, as plain numbers; empty for a fixed scale."""
        state = self._scaler.state_dict()
        plain = {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
        return {**plain, _OF_MEAN: True} if plain else {}

    def load_state_dict(self, state: dict[str, float | int], tokens: int) -> None:
        """Restore the state that `state_dict` returned. The scale of an earlier version, which belonged to the sum of
        the losses, becomes the power of 2 times as large at which gradients are about what they were.

        Args:
            tokens: of a global batch.
        """
        scale = float(state["scale"])
        if not state.get(_OF_MEAN, False):
            scale *= 2.0 ** (tokens.bit_length() - 1)
        self._scaler.load_state_dict({**state, "scale": torch.tensor([scale], dtype=torch.float32)})


def of_the_mean(state: dict[str, float | int]) -> dict[str, float | int]:
    """Return the saved state of another program's scaler, whose scale belongs to the mean loss, as one of ours."""
    return {**state, _OF_MEAN: True} if state else {}


def share_loss_scale(optimizer: ChainedOptimizer) -> LossScale | None:
    """Give all optimizers of a run, before their first use, one loss scale, and return it; None where they have
    none."""
    scaled: list[Any] = [part for part in optimizer.chained_optimizers if getattr(part, "grad_scaler", None)]
    if not scaled:
        return None
    shared = LossScale(scaled[0].grad_scaler, len(scaled))
    for part in scaled:
        part.grad_scaler = shared
    return shared


def loss_scale_of(optimizer: ChainedOptimizer) -> LossScale | None:
    """Return the loss scale that `share_loss_scale` gave to the optimizers; None where they have none."""
    scalers = (getattr(part, "grad_scaler", None) for part in optimizer.chained_optimizers)
    return next((scaler for scaler in scalers if isinstance(scaler, LossScale)), None)
