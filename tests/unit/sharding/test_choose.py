"""The scheme that the flags ask for."""

from typing import Any

import pytest

from megatron_ext.sharding.choose import sharding_of
from megatron_ext.sharding.ddp import DataParallel
from megatron_ext.sharding.fsdp2 import FSDP2
from megatron_ext.sharding.host_memory import InHostMemory
from megatron_ext.sharding.megatron_fsdp import MegatronFSDP
from tests.support.small_models import config_of_two


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("layout", "kind", "on_meta", "on_host"),
    [
        ({"use_distributed_optimizer": True}, DataParallel, False, False),
        ({"use_torch_fsdp2": True}, FSDP2, True, False),
        ({"use_torch_fsdp2": True, "torch_fsdp2_cpu_offload": True}, FSDP2, True, True),
        (
            {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"},
            MegatronFSDP,
            False,
            False,
        ),
    ],
)
def test_the_scheme_that_the_flags_ask_for(
    layout: dict[str, Any], kind: type, on_meta: bool, on_host: bool, offload: bool
) -> None:
    """An optimizer in host memory changes nothing of where the weights are; every flag that moves something is told."""
    scheme = sharding_of(config_of_two(layout, optimizer_cpu_offload=offload))
    inner = scheme._scheme if isinstance(scheme, InHostMemory) else scheme
    assert (type(inner), isinstance(scheme, InHostMemory)) == (kind, offload)
    assert (scheme.builds_on_meta, scheme.lives_on_host) == (on_meta, on_host)
    flags = ["--optimizer-cpu-offload"] * offload + ["--torch-fsdp2-cpu-offload"] * on_host
    assert list(scheme.host_memory_flags) == flags
