"""Lists the optimizers of the core and of plugins: the one place that knows more of an optimizer than its name.

    traits = traits_of(config.optimizer)
    traits.state_names(config.optimizer)       # ("exp_avg", "exp_avg_sq") for Adam
    traits.bytes_each(config.optimizer)        # 8 bytes for each element of a parameter

The traits are documented in `optimizer_traits.py`.
"""

from collections.abc import Mapping
from typing import Any

from megatron_ext.config.derived.optimizer_traits import ADAM, MUON, SGD, OptimizerTraits
from megatron_ext.config.derived.sharding import Flag
from megatron_ext.registry import brought

OPTIMIZERS: dict[str, OptimizerTraits] = {traits.name: traits for traits in (ADAM, SGD, MUON, *brought("optimizers"))}
"""Optimizers by name, in the order of the choices of `--optimizer`."""


def traits_of(settings: Any) -> OptimizerTraits:
    """Return the traits of the optimizer that an `OptimizerConfig` chooses."""
    traits = OPTIMIZERS[settings.optimizer]
    return traits.in_16_bits or traits if has_short_averages(settings) else traits


def has_own_optimizer(saved: Mapping[str, Any]) -> bool:
    """Return whether the values of a checkpoint's config.yaml name a user's own optimizer, which only the script that
    brings it knows."""
    return "optimizer" in saved and saved["optimizer"] not in OPTIMIZERS


def has_short_averages(settings: Any) -> bool:
    """Return whether an `OptimizerConfig` asks for averages in 16 bits."""
    return not {settings.exp_avg_dtype, settings.exp_avg_sq_dtype} <= {"fp32"}


def run_by(scheme: Flag) -> list[OptimizerTraits]:
    """Return the optimizers that a sharding scheme can run."""
    return [traits for traits in OPTIMIZERS.values() if scheme in traits.schemes]
