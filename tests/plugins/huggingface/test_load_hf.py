"""Which part of a Hugging Face model a rank reads, and how it is rounded."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.parallel.rows import RowShard
from megatron_ext.plugins.huggingface import load_hf
from tests.support.small_models import small_config

_SHARDING = SimpleNamespace(reload_masters=lambda optimizer: None, parts=lambda optimizer: [])


@pytest.mark.parametrize("bf16", [True, False])
def test_rows_that_are_masters_are_not_rounded(bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 + 2^-12 is 1 in bf16. The rank has two of four rows, in fp32."""
    value = 1.0 + 2**-12
    local = torch.zeros(2, 3)
    weight = torch.nn.Parameter(torch.zeros(0))
    shard = RowShard(local, 1, (4, 3), None)

    def read(folder: Any, mapping: Any, tensor: torch.Tensor, rank: int, size: int) -> None:
        tensor.copy_(torch.arange(4.0)[:, None] * (1.0 + 2**-12))

    mapping = SimpleNamespace(parameter=SimpleNamespace(name="weight", expert=None))
    folder = SimpleNamespace(check=lambda config: None, family=None, remarks=[])
    monkeypatch.setattr(load_hf, "HFFolder", lambda path: folder)
    monkeypatch.setattr(load_hf, "state_dict_mapping", lambda config, family: [mapping])
    monkeypatch.setattr(load_hf, "global_named_parameters", lambda chunks: [("weight", weight)])
    monkeypatch.setattr(load_hf, "row_shard", lambda tensor: shard)
    monkeypatch.setattr(load_hf, "by_expert", lambda name, tensor: [(name, tensor)])
    monkeypatch.setattr(load_hf, "read_shard", read)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    run: Any = SimpleNamespace(
        config=small_config(training={"bf16": bf16}), chunks=[], groups=SimpleNamespace(tp=group)
    )
    run.sharding, run.optimizer = _SHARDING, None
    load_hf.load_huggingface(run, "folder")
    assert local.tolist() == [[value] * 3, [2 * value] * 3]


@pytest.mark.parametrize(("expert", "place"), [(None, (1, 2)), (0, (0, 1))])
def test_experts_are_read_by_who_shares_their_matrices(
    expert: int | None, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tensor-parallel ranks each has whole experts."""
    seen: list[tuple[int, int]] = []
    mapping = SimpleNamespace(parameter=SimpleNamespace(name="weight", expert=expert))
    folder = SimpleNamespace(check=lambda config: None, family=None, remarks=[])
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    monkeypatch.setattr(load_hf, "HFFolder", lambda path: folder)
    monkeypatch.setattr(load_hf, "state_dict_mapping", lambda config, family: [mapping])
    monkeypatch.setattr(load_hf, "global_named_parameters", lambda chunks: [("weight", weight)])
    monkeypatch.setattr(load_hf, "by_expert", lambda name, tensor: [(name, tensor)])
    monkeypatch.setattr(load_hf, "read_shard", lambda folder, mapping, tensor, rank, size: seen.append((rank, size)))
    tensor = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    whole = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    groups = SimpleNamespace(tp=tensor, expt_tp=whole)
    run: Any = SimpleNamespace(config=small_config(), chunks=[], groups=groups, optimizer=None)
    run.sharding = _SHARDING
    load_hf.load_huggingface(run, "folder")
    assert seen == [place]
