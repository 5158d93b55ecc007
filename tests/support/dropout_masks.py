"""The masks of a real forward pass of the whole model.

`_MaskRecorder` stands between the model and torch's two operations with dropout, and runs each of them twice from the
same state of the generator: once on values that show the mask, and once as the model asked.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from tests.support.checkpoints import build, train

# The last of two flags counts. Heads of 32 channels are as long as a sample, so that an identity fits as values.
DROPOUT = "--num-attention-heads 2 --hidden-dropout 0.1 --attention-dropout 0.1"


class _MaskRecorder:
    """Collects the masks of every dropout in order: hidden ones and those of attention."""

    def __init__(self) -> None:
        self.hidden: list[np.ndarray] = []
        self.attention: list[np.ndarray] = []
        self._dropout, self._attend = F.dropout, F.scaled_dot_product_attention
        F.dropout, F.scaled_dot_product_attention = self._on_dropout, self._on_attention  # pyright: ignore

    def _on_dropout(self, x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if training and p > 0.0:
            self.hidden.append(_twice(lambda: self._dropout(torch.ones_like(x), p)))
        return self._dropout(x, p, training, inplace)

    def _on_attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        if options.get("dropout_p", 0.0) > 0.0:
            identity = torch.eye(value.size(-2), value.size(-1)).expand_as(value)
            self.attention.append(
                _twice(lambda: self._attend(torch.zeros_like(query), torch.zeros_like(key), identity, **options))
            )
        return self._attend(query, key, value, **options)


def _twice(show: Callable[[], torch.Tensor]) -> np.ndarray:
    """What survives in `show`, with the generator left as it was."""
    state = torch.get_rng_state()
    with torch.no_grad():
        survives = (show() != 0.0).numpy()
    torch.set_rng_state(state)
    return survives


def masks_of_first_step(flags: list[str]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    run = build([*flags, "--device", "cpu"])
    before = F.dropout, F.scaled_dot_product_attention
    recorder = _MaskRecorder()
    train(run, 1)
    F.dropout, F.scaled_dot_product_attention = before
    run.loaders.close()
    return recorder.hidden, recorder.attention


def equal_masks(masks: list[np.ndarray], others: list[np.ndarray]) -> list[bool]:
    assert len(masks) == len(others) > 0
    return [np.array_equal(mask, other) for mask, other in zip(masks, others, strict=True)]
