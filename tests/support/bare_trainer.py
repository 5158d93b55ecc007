"""A trainer without a model, for callbacks that are called by themselves."""

from types import SimpleNamespace
from typing import Any

import torch

from megatron_ext.train.state import TrainState
from tests.support.small_models import small_config

NOTHING: Any = None


def bare_trainer(iteration: int = 0, **run: Any) -> Any:
    """Return a trainer whose run has the parts that are given; what it is told of evaluations is in `heard`."""
    state = TrainState(iteration=iteration, consumed_samples=8 * iteration)
    here = SimpleNamespace(torch_device=torch.device("cpu"))
    made = {"state": state, "rank": 0, "world_size": 1, "is_last_rank": True, "device": here, "config": small_config()}
    parts = SimpleNamespace(**{**made, **run})
    heard: list[Any] = []
    return SimpleNamespace(run=parts, position=parts.state, finished=False, heard=heard, report_evaluation=heard.append)
