"""What three ranks, which are threads, send to each other so that flat shards are saved as whole weights."""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Barrier, local
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.sharding.flat_shards import FlatPart
from megatron_ext.sharding.parts import IN_PLACE, MASTER, Exchange

SIZES = {"a": (3,), "b": (2, 4), "c": (1,), "d": (2, 2)}
"""Of 16 elements, which three ranks divide in shards of 6, with two of padding."""


class _Ranks:
    """Three ranks as threads, each with its part of two buckets of weights and of their states."""

    def __init__(self, dtype: torch.dtype, grads_on: str, exchange: Exchange):
        self.ranks, self.exchange, self.dtype = 3, exchange, dtype
        self.rank = local()
        self.barrier = Barrier(3)
        self.sent: list[Any] = [None] * 3
        self.groups: list[Any] = []
        self.weights = [
            {name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for name, shape in SIZES.items()}
            for _ in range(2)
        ]
        sizes = [weight.numel() for weight in self.weights[0].values()]
        ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
        self.places = list(pairwise(ends))
        names = ["exp_avg", "exp_avg_sq", MASTER]
        self.values = [
            {name: torch.arange(18.0) + 100.0 * number + 1000.0 * bucket for number, name in enumerate(names)}
            for bucket in range(2)
        ]
        self.buckets = [
            SimpleNamespace(
                # The engine lists weights from the last to the first.
                params_list=list(reversed(weights.values())),
                param_to_index=dict(zip(weights.values(), self.places, strict=True)),
                grad_data=torch.zeros(18, device=grads_on),
            )
            for weights in self.weights
        ]

    def all_to_all(
        self, out: torch.Tensor, given: torch.Tensor, receives: list[int], sends: list[int], group: Any
    ) -> None:
        rank = self.rank.number
        self.groups.append(group.name)
        self.sent[rank] = list(given.split(sends))
        self.barrier.wait(20)
        found = [everyones[rank] for everyones in self.sent]
        assert [len(one) for one in found] == receives
        out.copy_(torch.cat(found))
        self.barrier.wait(20)

    def saved(self, rank: int) -> tuple[dict[str, dict[str, Any]], int | None]:
        """What a rank saves, by the names of the weights and of their states."""
        self.rank.number = rank
        begin, end = 6 * rank, 6 * rank + 6
        states, maps = {}, []
        for weights, values in zip(self.weights, self.values, strict=True):
            of_rank = {}
            for weight, (first, last) in zip(weights.values(), self.places, strict=True):
                low, high = max(first, begin), min(last, end)
                if low < high:
                    of_rank[weight] = {"gbuf_local": SimpleNamespace(start=low - begin, end=high - begin)}
                    states[id(weight)] = {name: whole[low:high] for name, whole in values.items()}
            maps.append({"param_map": of_rank})
        group = SimpleNamespace(name="training", rank=lambda: rank, size=lambda: 3)
        core = SimpleNamespace(
            data_parallel_group=group,
            buffers=[SimpleNamespace(param_dtype=self.dtype, buckets=self.buckets)],
            gbuf_ranges=[{"dtypes": maps}],
            optimizer=None,
        )
        part: Any = FlatPart(core)  # pyright: ignore[reportArgumentType]
        found, writer = part.to_save(states, ["exp_avg", "exp_avg_sq"], self.exchange)
        names = {id(w): f"{name}{n}" for n, weights in enumerate(self.weights) for name, w in weights.items()}
        return {names[key]: state for key, state in found.items()}, writer


def _other(group: Any) -> Any:
    return SimpleNamespace(name=f"not {group.name}", rank=group.rank, size=group.size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("grads_on", "exchange", "group"),
    [("cpu", IN_PLACE, "training"), ("meta", Exchange(_other, torch.device("cpu")), "not training")],
)
def test_flat_shards_are_saved_as_whole_weights(
    grads_on: str, exchange: Exchange, group: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each by the rank whose shard has its beginning; masters of 16-bit weights alone; by the groups that may be used,
    on the device that they need."""
    ranks = _Ranks(dtype, grads_on, exchange)
    monkeypatch.setattr(torch.distributed, "all_to_all_single", ranks.all_to_all)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(ranks.saved, range(3)))
    assert [(sorted(states), writer) for states, writer in found] == [
        (["a0", "a1", "b0", "b1"], 0),
        (["c0", "c1"], 1),
        (["d0", "d1"], 2),
    ]
    names = ["exp_avg", "exp_avg_sq", *([MASTER] if dtype != torch.float32 else [])]
    for states, _ in found:
        for name, state in states.items():
            (first, last), bucket = ranks.places[list(SIZES).index(name[0])], int(name[1])
            assert list(state) == names
            for kind, tensor in state.items():
                expected = ranks.values[bucket][kind][first:last].view(SIZES[name[0]])
                assert torch.equal(tensor, expected), (name, kind)
    assert set(ranks.groups) == {group}
