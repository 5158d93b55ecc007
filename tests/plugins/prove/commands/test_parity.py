"""tools/parity.py where each rank needs a GPU; tests/parity/test_parity_tool.py runs it."""

import pytest

from megatron_ext.device import gpu_inventory
from megatron_ext.device.gpu_inventory import Gpu, Survey
from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.prove.commands import parity


@pytest.mark.parametrize(("gpus", "enough"), [(None, False), (3, False), (4, True), (5, True)])
def test_each_rank_of_a_comparison_has_a_gpu(gpus: int | None, enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    each = tuple(Gpu(index, "H100", (9, 0), 80, 80) for index in range(gpus or 0))
    found = None if gpus is None else Survey("570", "2.11", "12.8", "2.27", each)
    monkeypatch.setattr(gpu_inventory, "survey", lambda: found)
    if enough:
        parity._start_device("cuda", 4)
    else:
        with pytest.raises(ConfigurationError, match=f"needs 4 GPUs for 4 ranks, but this machine shows {gpus or 0};"):
            parity._start_device("cuda", 4)
    parity._start_device("cpu", 4)
