"""What optimizers of ours have in common: every tensor is updated by itself."""

from typing import Any

import torch


class ByTensor(torch.optim.Optimizer):
    """An optimizer that updates one tensor after another, in `_update`."""

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
                if weights.grad is not None:
                    self._update(weights, weights.grad, group)
        return loss

    def _update(self, weights: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError
