"""After how many steps without an overflow a loss scale doubles."""

import itertools

import pytest
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from megatron_ext.optim.loss_scale import LossScale


def doublings(overflows: set[int], window: int, steps: int) -> list[int]:
    """Return after which steps, counted from 1, the scale is larger than before."""
    scale = LossScale(DynamicGradScaler(1024.0, 1.0, 2.0, 0.5, window, 1), 1)
    scales = [scale.scale.item()]
    for step in range(1, steps + 1):
        scale.update(step in overflows)
        scales.append(scale.scale.item())
    return [step for step, (before, after) in enumerate(itertools.pairwise(scales), 1) if after > before]


@pytest.mark.parametrize(
    ("overflows", "expected"), [(set[int](), [4, 8, 12]), ({2}, [6, 10, 14]), ({4}, [8, 12])], ids=str
)
def test_it_doubles_after_the_window(overflows: set[int], expected: list[int]) -> None:
    """As megatron-core; DeepSpeed 0.19.8 doubles a step later, once after the start and after each overflow."""
    assert doublings(overflows, 4, 14) == expected
