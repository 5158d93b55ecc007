"""Updates that the device itself leaves out, where a number on it says so.

torch's fused Adam takes `found_inf` for that, which its gradient scaler uses; the optimizers of `by_tensor.py` do the
same. Where it is 1, weights, averages and the count of updates stay as they are, to the bit.
"""

import torch

from megatron_ext.optim.by_tensor import ByTensor


def can_mask(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether `mask_by` works.

    It does not with torch's SGD, whose fused kernel has other bits, with an optimizer that counts updates on the host
    (`short_adam.py`), nor with those of other packages.
    """
    if isinstance(optimizer, ByTensor):
        return optimizer.can_be_masked
    return type(optimizer) in (torch.optim.Adam, torch.optim.AdamW) and all(
        group["fused"] for group in optimizer.param_groups
    )


def mask_by(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor) -> None:
    """Have every later update change nothing while `found_inf`, an fp32 scalar on the device, is 1 and not 0."""
    assert can_mask(optimizer), f"{type(optimizer).__name__} cannot be masked"
    optimizer.found_inf = found_inf  # pyright: ignore[reportAttributeAccessIssue] (torch's own name)
