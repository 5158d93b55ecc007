"""Chooses the sharding scheme of a run. Nobody else asks which it is."""

import importlib

from megatron_ext.config.schema import Config
from megatron_ext.sharding.host_memory import InHostMemory
from megatron_ext.sharding.scheme import Sharding


def sharding_of(config: Config) -> Sharding:
    """Return the scheme that the flags of `config` ask for, with its optimizer in host memory where they say so."""
    module, _, name = config.layout.sharding.implementation.partition(":")
    sharding = getattr(importlib.import_module(module), name)(config)
    return InHostMemory(sharding) if config.optimizer.optimizer_cpu_offload else sharding
