"""Chooses the sharding scheme of a run. Nobody else asks which it is."""

from megatron_ext.config.schema import Config
from megatron_ext.sharding.ddp import DataParallel
from megatron_ext.sharding.fsdp2 import FSDP2
from megatron_ext.sharding.host_memory import InHostMemory
from megatron_ext.sharding.megatron_fsdp import MegatronFSDP
from megatron_ext.sharding.protocol import Sharding


def sharding_of(config: Config) -> Sharding:
    """Return the scheme that the flags of `config` ask for, with its optimizer in host memory where they say so."""
    sharding = _scheme(config)
    return InHostMemory(sharding) if config.optimizer.optimizer_cpu_offload else sharding


def _scheme(config: Config) -> Sharding:
    if config.layout.use_torch_fsdp2:
        return FSDP2(config)
    if config.layout.use_megatron_fsdp:
        return MegatronFSDP(config)
    return DataParallel(config)
