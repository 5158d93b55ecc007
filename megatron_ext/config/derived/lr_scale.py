"""--lr-scale-rule carries a learning rate that was found with one global batch over to another.

    linear    lr x batch / base             Goyal et al. 2017 (arXiv:1706.02677), section 2.1: SGD
    sqrt      lr x sqrt(batch / base)       Krizhevsky 2014 (arXiv:1404.5997); for Adam
                                            Malladi et al. 2022 (arXiv:2205.10287)

The global batch counts, never the number of ranks: the ranks of one tensor-, context- or pipeline-parallel group see
the same samples.

A resolved configuration holds the scaled rates, and its own global batch as the base: resolving it again changes
nothing, and another global batch scales the rates from this base.
"""

import math
from collections.abc import Mapping
from typing import Any

from megatron_ext.config.schema import Config

SCALED = ("lr", "min_lr", "decoupled_lr", "decoupled_min_lr")
FLAGS = ("lr_scale_rule", "lr_scale_base_batch_size")


def factor(rule: str, base: int, batch: int) -> float:
    """Return the factor that scales a learning rate found with `base` samples a step to `batch` samples a step."""
    return {"none": 1.0, "linear": batch / base, "sqrt": math.sqrt(batch / base)}[rule]


def scale(values: dict[str, Any]) -> None:
    """Scale the rates among `values`, by field name, in place; do nothing where a value that it needs is missing or
    wrong."""
    rule = values.get("lr_scale_rule", "none")
    base, batch = values.get("lr_scale_base_batch_size"), values.get("global_batch_size")
    if rule == "none" or base is None or batch is None or min(base, batch) < 1:
        return
    for name in SCALED:
        if values.get(name) is not None:
            values[name] *= factor(rule, base, batch)
    values["lr_scale_base_batch_size"] = batch


def scaling_text(typed: Mapping[str, Any], config: Config) -> str | None:
    """Return how the rates came about, from the values that were typed; None without --lr-scale-rule."""
    optimizer, batch = config.optimizer, config.training.global_batch_size
    if optimizer.lr_scale_rule == "none":
        return None
    base = typed["lr_scale_base_batch_size"]
    ratio = f"{batch} / {base}"
    how = f"sqrt({ratio})" if optimizer.lr_scale_rule == "sqrt" else ratio
    whose = "the full global batch" if config.training.rampup_batch_size is not None else "the global batch"
    return (
        f"learning rate        {optimizer.lr:g} = --lr {typed['lr']:g} x {how}, lowest {optimizer.min_lr:g} "
        f"(--lr-scale-rule {optimizer.lr_scale_rule}: {whose} over the base batch)"
    )
