"""Rows that ranks keep of weights, and experts in a checkpoint: marks, clipping, and places, without ranks."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.huggingface import load
from megatron_ext.parallel.rows import RowShard, mark
from megatron_ext.parts.experts.compute import ExpertMatrices
from megatron_ext.sharding.megatron_fsdp import MegatronFSDPChunk
from megatron_ext.sharding.row_shards import HostRowOptimizer, RowPart, _optimized
from tests.support.small_models import small_config


def test_rows_have_the_marks_of_their_weight() -> None:
    """By which the engine counts copies once in the norm: what tensor-parallel ranks divide, experts, tied copies."""
    weight: Any = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
    weight.tensor_model_parallel, weight.allreduce, weight.shared = True, False, True
    mark(weight, RowShard(weight[1:3], 1, (4, 3), None))
    rows: Any = _optimized(weight)
    assert (rows.tensor_model_parallel, rows.allreduce, rows.shared) == (True, False, True)
    assert not rows.requires_grad
    rows.add_(1.0)
    assert weight[1].tolist() == [4.0, 5.0, 6.0], "what is updated is in use"
    plain: Any = torch.nn.Parameter(torch.zeros(2))
    mark(plain, RowShard(plain, 0, (2,), None))
    assert not hasattr(_optimized(plain), "shared")


def test_masters_are_saved_where_16_bits_are_computed_with() -> None:
    for dtype, saves in ((torch.float32, False), (torch.bfloat16, True), (torch.float16, True)):
        core: Any = SimpleNamespace(compute_dtype=dtype, optimizer=None)
        assert RowPart(core).saves_master(torch.nn.Parameter(torch.zeros(1))) == saves


@pytest.mark.parametrize(("norm", "share"), [(4.0, 0.5), (1.0, 1.0)])
def test_gradients_in_host_memory_are_only_made_smaller(norm: float, share: float) -> None:
    optimizer: Any = HostRowOptimizer.__new__(HostRowOptimizer)
    rows = [torch.zeros(2), torch.zeros(3), torch.zeros(1)]
    for one in rows[:2]:
        one.grad = torch.ones_like(one)
    optimizer.get_parameters = lambda: rows
    optimizer.clip(2.0, norm)
    for one in rows[:2]:
        assert one.grad is not None
        torch.testing.assert_close(one.grad, torch.full_like(one, share), rtol=1e-6, atol=0)
    assert rows[2].grad is None


@pytest.mark.parametrize(
    ("strategy", "fetches", "frees"),
    [
        ("no_shard", False, False),
        ("optim", True, False),
        ("optim_grads", True, False),
        ("optim_grads_params", False, True),
    ],
)
def test_weights_follow_the_rows_that_were_read(strategy: str, fetches: bool, frees: bool) -> None:
    """Where every rank has whole weights and a part of the masters, it fetches the others' at once."""
    called: list[str] = []
    fsdp = SimpleNamespace(
        install_optimized_model_weights=lambda: called.append("install"),
        start_param_sync=lambda force_sync: called.append(f"fetch {force_sync}"),
        all_gather_pipeline=SimpleNamespace(reset=lambda preserve_non_fsdp_units: called.append("free")),
    )
    chunk: Any = SimpleNamespace(strategy=strategy, module=fsdp)
    chunk.free_gathered = lambda: MegatronFSDPChunk.free_gathered(chunk)
    MegatronFSDPChunk.install_rows(chunk)
    assert called == ["install", *(["free"] if frees else []), *(["fetch True"] if fetches else [])]


@pytest.mark.parametrize(("gated", "divided"), [(True, 0), (False, 0), (False, 1)])  # the second matrix has no gate
def test_experts_of_tensor_parallel_ranks_are_whole_in_a_checkpoint(gated: bool, divided: int) -> None:
    """Two ranks divide the matrices of four experts, two of which each of two others has. A gate lies above its whole
    up projection, of each of which a rank has a part."""
    rows, columns = (8, 3) if divided == 0 else (3, 8)
    whole = torch.arange(4.0 * rows * columns).view(4, rows, columns)
    found = torch.full_like(whole, -1.0)
    for expert_rank in range(2):
        for rank in range(2):
            parts = whole.chunk(2, 1) if gated else (whole,)
            own = torch.cat([part.chunk(2, 1 + divided)[rank] for part in parts], 1)
            experts: Any = ExpertMatrices.__new__(ExpertMatrices)
            torch.nn.Module.__init__(experts)
            experts.experts, experts.divided, experts.gated = (
                range(2 * expert_rank, 2 * expert_rank + 2),
                divided,
                gated,
            )
            experts.weight = torch.nn.Parameter(own[2 * expert_rank : 2 * expert_rank + 2].contiguous())
            groups = {"ep": (expert_rank, 2), "expt_tp": (rank, 2), "expt_dp": (3, 4), "dp_cp": (5, 8)}
            experts.groups = SimpleNamespace(
                **{
                    name: SimpleNamespace(rank=lambda rank=rank: rank, size=lambda size=size: size)
                    for name, (rank, size) in groups.items()
                }
            )
            factory = experts.sharded("weight", "experts.weight", ())["weight"]
            assert factory.replica_id == (0, 0, 3)
            pieces = factory.build()
            for piece in pieces:
                assert piece.global_shape == tuple(whole.shape)
                first = piece.global_offset
                shape = piece.data.shape
                there = found[first[0], first[1] : first[1] + shape[0], first[2] : first[2] + shape[1]]
                assert bool((there == -1.0).all()), "nobody else writes it"
                there.copy_(piece.data)
            assert torch.equal(factory.merge_fn([piece.data for piece in pieces]), experts.weight)
    assert torch.equal(found, whole)


@pytest.mark.parametrize(("bf16", "value"), [(True, 1.0), (False, 1.0 + 2**-12)])
def test_masters_of_a_loaded_model_are_the_rounded_weights(
    bf16: bool, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in every other layout: 1 + 2^-12 is 1 in bf16. The rank has two of four rows, in fp32."""
    local = torch.zeros(2, 3)
    weight = torch.nn.Parameter(torch.zeros(0))
    shard = RowShard(local, 1, (4, 3), None)

    def read(folder: Any, mapping: Any, tensor: torch.Tensor, rank: int, size: int) -> None:
        tensor.copy_(torch.arange(4.0)[:, None] * (1.0 + 2**-12))

    mapping = SimpleNamespace(parameter=SimpleNamespace(name="weight", expert=None))
    folder = SimpleNamespace(check=lambda config: None, family=None)
    monkeypatch.setattr(load, "HFFolder", lambda path: folder)
    monkeypatch.setattr(load, "state_dict_mapping", lambda config, family: [mapping])
    monkeypatch.setattr(load, "global_named_parameters", lambda chunks: [("weight", weight)])
    monkeypatch.setattr(load, "row_shard", lambda tensor: shard)
    monkeypatch.setattr(load, "by_expert", lambda name, tensor: [(name, tensor)])
    monkeypatch.setattr(load, "read_shard", read)
    group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    run: Any = SimpleNamespace(
        config=small_config(training={"bf16": bf16}), chunks=[], groups=SimpleNamespace(tp=group)
    )
    run.sharding, run.optimizer = SimpleNamespace(reload_masters=lambda optimizer: None), None
    load.load_huggingface(run, "folder")
    assert local.tolist() == [[value] * 3, [2 * value] * 3]


@pytest.mark.parametrize(("expert", "place"), [(None, (1, 2)), (0, (0, 1))])
def test_experts_are_read_by_who_shares_their_matrices(
    expert: int | None, place: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two tensor-parallel ranks each has whole experts."""
    seen: list[tuple[int, int]] = []
    mapping = SimpleNamespace(parameter=SimpleNamespace(name="weight", expert=expert))
    folder = SimpleNamespace(check=lambda config: None, family=None)
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    monkeypatch.setattr(load, "HFFolder", lambda path: folder)
    monkeypatch.setattr(load, "state_dict_mapping", lambda config, family: [mapping])
    monkeypatch.setattr(load, "global_named_parameters", lambda chunks: [("weight", weight)])
    monkeypatch.setattr(load, "by_expert", lambda name, tensor: [(name, tensor)])
    monkeypatch.setattr(load, "read_shard", lambda folder, mapping, tensor, rank, size: seen.append((rank, size)))
    tensor = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    whole = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    groups = SimpleNamespace(tp=tensor, expt_tp=whole)
    run: Any = SimpleNamespace(config=small_config(), chunks=[], groups=groups, optimizer=None)
    run.sharding = SimpleNamespace(reload_masters=lambda optimizer: None)
    load.load_huggingface(run, "folder")
    assert seen == [place]
