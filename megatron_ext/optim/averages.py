"""Keeps an exponential moving average of every weight (--ema-decay), as one more state of its optimizer.

Source: Polyak and Juditsky 1992; exponential as in Karras et al. 2024 (arXiv:2312.02696), section 3. After each update
the average is decay x average + (1 - decay) x weight; it begins as the weight. It is of the fp32 masters where weights
have 16 bits, and is divided, kept in host memory and saved as Adam's averages are.
"""

from functools import partial
from typing import Any

import torch

from megatron_ext.config.derived.optimizer_traits import AVERAGE
from megatron_ext.config.schema import OptimizerConfig
from megatron_ext.device.many_tensors import lerp_
from megatron_ext.optim.torch_optimizer import begin_state


def keep_averages(optimizer: torch.optim.Optimizer, settings: OptimizerConfig) -> None:
    """Have every later update of this optimizer be followed by one of the averages; without --ema-decay do nothing."""
    if settings.ema_decay:
        optimizer.register_step_pre_hook(partial(_begin, settings))
        optimizer.register_step_post_hook(partial(_follow, settings.ema_decay))


def _begin(settings: OptimizerConfig, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for main in group["params"]:
            if AVERAGE not in optimizer.state[main]:
                begin_state(main, group, optimizer, settings)


@torch.no_grad()
def _follow(decay: float, optimizer: torch.optim.Optimizer, *_: Any) -> None:
    masked: torch.Tensor | None = getattr(optimizer, "found_inf", None)
    share = 1.0 - decay if masked is None else (1.0 - decay) * (masked <= 0)
    mains = [main for group in optimizer.param_groups for main in group["params"]]
    lerp_([optimizer.state[main][AVERAGE] for main in mains], mains, share)
