"""What optimizers of ours have in common: every tensor is updated by itself."""

from typing import Any

import torch


class ByTensor(torch.optim.Optimizer):
    """An optimizer that updates one tensor after another, in `_update`."""

    found_inf: torch.Tensor | None = None
    """Scalar on the device, where the states are, too; while it is 1, an update changes nothing. None: every update is
    made."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every tensor that has a gradient.

        Args:
            closure: computes the loss and the gradients anew, which are then used.
        Returns:
            What the closure returns; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                if self.found_inf is None:
                    self._update(weights, weights.grad, group)
                else:
                    self._masked_update(weights, weights.grad, group, self.found_inf > 0)
        return loss

    def _masked_update(
        self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any], leave_out: torch.Tensor
    ) -> None:
        """Update, and put back what was there before where `leave_out`; a state that begins is 0 then."""
        before = {name: kept.clone() for name, kept in self.state[weights].items()}
        weights_before = weights.clone()
        self._update(weights, gradient, group)
        weights.copy_(torch.where(leave_out, weights_before, weights))
        for name, kept in self.state[weights].items():
            kept.copy_(torch.where(leave_out, before.get(name, torch.zeros_like(kept)), kept))

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError
