"""How ranks that hold the same weights share the work of writing and of reading a checkpoint."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import checkpoint_state_dict, load_checkpoint
from tests.support.small_runs import built


class Gpu:
    """In the place of a GPU."""

    kind = "cuda"


@pytest.mark.parametrize(("on_gpu", "exchange"), [(True, "broadcast"), (False, "gather_object")])
def test_who_reads_a_checkpoint_together(on_gpu: bool, exchange: str) -> None:
    """All that hold the same weights, context-parallel ranks too; the engine's broadcast needs a GPU."""
    gpu: Any = Gpu()
    with built("--ckpt-fully-parallel-load") as run:
        found: Any = load_checkpoint._reading(dataclasses.replace(run, device=gpu) if on_gpu else run)
        assert found.parallelization_group is run.groups.dp_cp
        assert found.exchange_algo == exchange
    with built() as run:
        assert isinstance(load_checkpoint._reading(run), load_checkpoint.TorchDistLoadShardedStrategy)


class _Group:
    def __init__(self, ranks: int):
        self.size = lambda: ranks


def test_weights_are_written_in_turn_by_those_that_hold_them() -> None:
    """The largest first, each by whoever has the least to write; experts by their own copies. The engine takes the
    replica with the number 0 for the one that writes."""
    groups: Any = SimpleNamespace(dp_cp=_Group(3), expt_dp=_Group(2))

    def weight(elements: int, *, expert: bool = False) -> Any:
        data: Any = torch.zeros(elements)
        data.allreduce = not expert
        return SimpleNamespace(data=data, replica_id=(0, 0, 1))

    weights: Any = {"a": weight(5), "b": weight(9), "c": weight(4), "d": weight(4), "e": weight(7, expert=True)}
    weights["f"] = weight(6, expert=True)
    models = checkpoint_state_dict.Contents({}, weights, {}, {})
    checkpoint_state_dict._spread(models, SimpleNamespace(groups=groups))  # pyright: ignore[reportArgumentType]
    assert models.replicas == dict.fromkeys(weights, 1), "where they were"
    writers = {name: (1 - one.replica_id[-1]) % (2 if name in "ef" else 3) for name, one in weights.items()}
    assert writers == {"b": 0, "a": 1, "c": 2, "d": 2, "e": 0, "f": 1}
    assert all(one.replica_id[:-1] == (0, 0) and one.replica_id[-1] in range(3) for one in weights.values())
