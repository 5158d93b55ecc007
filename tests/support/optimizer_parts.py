"""A part of an optimizer, for tests of its state."""

from types import SimpleNamespace
from typing import Any

import torch

from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.optim.torch_optimizer import torch_optimizer
from megatron_ext.sharding.parts import OnDevice


def optimizer_part(config: OptimizerConfig, weights: list[torch.nn.Parameter], *, divides: bool) -> Any:
    """Return a part of the optimizer that updates these weights; `divides` says whether ranks divide its state."""
    made = torch_optimizer(config)([{"params": weights}])
    return SimpleNamespace(
        main_parameters=lambda: [(weight, weight) for weight in weights],
        updater=OnDevice(made),
        saves_master=lambda weight: False,
        rows_to_read=lambda weight: None,
        divides_state=divides,
    )
