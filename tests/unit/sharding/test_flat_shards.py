"""Which rows and ranges a rank has of a weight, which groups make a mesh, and what is switched off meanwhile."""

from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ext.checkpoint.native import agreement, resume
from megatron_ext.checkpoint.native.folder import Found
from megatron_ext.checkpoint.native.resume import Search
from megatron_ext.checkpoint.native.saved_rows import joined
from megatron_ext.device.weight_gradients import expect_first
from megatron_ext.parallel.rows import RowShard
from megatron_ext.sharding import fsdp2
from megatron_ext.sharding.ddp import DataParallel
from megatron_ext.sharding.flat_shards import FlatPart, _spans
from megatron_ext.sharding.gradient_buffers import completed
from megatron_ext.sharding.host_memory import HostOptimizer
from megatron_ext.sharding.megatron_fsdp import MegatronFSDP, MegatronFSDPChunk
from tests.support.small_models import small_config


def _group(name: str, rank: int, size: int) -> Any:
    return SimpleNamespace(name=name, rank=lambda: rank, size=lambda: size)


def _groups(copies: int) -> Any:
    """Rank 5 of 8, of which as many copies divide the weights."""
    return SimpleNamespace(
        dp_cp=_group("dp_cp", 5, 8),
        intra_dp_cp=_group("intra_dp_cp", 5 % (8 // copies), 8 // copies),
        inter_dist_opt=_group("inter_dist_opt", 5 // (8 // copies), copies),
    )


@pytest.mark.parametrize(("copies", "first", "replica"), [(4, 4, 2), (2, 2, 1), (1, 5, 0)])
def test_rows_as_torch_cuts_them(copies: int, first: int, replica: int) -> None:
    """7 rows: of two ranks the second begins at 4, of four at 2, of eight the sixth at 5."""
    parameter: Any = SimpleNamespace(size=lambda axis: 7, shape=(7, 3), _local_tensor=torch.zeros(1, 3))
    found = fsdp2._rows(parameter, _groups(copies))
    assert (found.first, found.replica, found.shape) == (first, replica, (7, 3))
    assert getattr(found.group, "name", None) == "intra_dp_cp"


def test_the_mesh_of_copies_of_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(fsdp2.DeviceMesh, "from_group", lambda *given, **named: made.append((given, named)))
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: list(range(10, 18)))
    fsdp2._mesh(_groups(1), "cpu")
    [((group, kind), named)] = made
    assert (group.name, kind, named) == ("dp_cp", "cpu", {})
    fsdp2._mesh(_groups(4), "cpu")
    (groups, kind), named = made[1]
    assert ([group.name for group in groups], kind) == (["inter_dist_opt", "intra_dp_cp"], "cpu")
    assert named["mesh"].tolist() == [[10, 11], [12, 13], [14, 15], [16, 17]]
    assert named["mesh_dim_names"] == ("replicate", "shard")


def _flat(start: int, end: int) -> FlatPart:
    part: Any = FlatPart.__new__(FlatPart)
    part.core = SimpleNamespace(
        _get_model_param_range_map=lambda weight: {"param": SimpleNamespace(start=start, end=end)}
    )
    return part


@pytest.mark.parametrize(
    ("start", "end", "rows"),
    [
        (5, 18, [(1, 2), (2, 4), (4, 5)]),  # a part of row 1 and of row 4
        (4, 16, [(1, 2), (2, 3), (3, 4)]),
        (5, 7, [(1, 2)]),
        (0, 24, [(0, 1), (1, 5), (5, 6)]),
    ],
)
def test_a_flat_range_reads_the_rows_that_it_touches(start: int, end: int, rows: list[tuple[int, int]]) -> None:
    """The first and the last, which others may have a part of, by themselves; then takes its own elements."""
    weight, part = torch.nn.Parameter(torch.arange(24.0).view(6, 4)), _flat(start, end)
    found = part.rows_to_read(weight)
    assert [(one.first, one.stop) for one in found] == rows
    read = weight.detach()[rows[0][0] : rows[-1][1]]
    assert part.own_of_rows(weight, read).tolist() == list(range(start, end))
    assert part.own(weight, weight.detach()).tolist() == list(range(start, end))
    state = part.to_read(weight, {"exp_avg": torch.zeros(end - start, dtype=torch.bfloat16)})
    assert (state["exp_avg"].shape, state["exp_avg"].dtype) == (read.shape, torch.float32)


def test_a_vector_has_no_rows_that_are_shared() -> None:
    found = _flat(2, 5).rows_to_read(torch.nn.Parameter(torch.zeros(8)))
    assert [(one.first, one.stop) for one in found] == [(2, 5)]


def test_a_weight_is_written_by_who_has_its_beginning() -> None:
    """Weights of 3, 8, 1 and 4 elements in four shards of 4: the third has no beginning."""
    assert _spans([(0, 3), (3, 11), (11, 12), (12, 16)], 4, 4) == [(0, 11), (0, 0), (11, 12), (12, 16)]


def test_pieces_are_joined_in_the_order_of_their_numbers() -> None:
    pieces = {str(number): torch.full((1, 1, 2), float(number)) for number in (10, 2, 11, 0, 1)}
    whole = joined(RowShard(torch.zeros(5, 2), 0, (5, 2), None), pieces)
    assert whole.tolist() == [[float(number)] * 2 for number in (0, 1, 2, 10, 11)]


class _Chunk:
    def __init__(self, name: str, calls: list[str]):
        self.name, self.calls = name, calls
        self.remove_forward_pre_hook_handles: dict[torch.nn.Module, Any] = {}

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        self.calls.append(f"{self.name} off{', gathered' if param_sync else ''}")

    def enable_forward_pre_hook(self) -> None:
        self.calls.append(f"{self.name} on")


@pytest.mark.parametrize("overlap", [True, False])
def test_gathers_are_off_while_weights_are_read(overlap: bool) -> None:
    """Of all chunks. Before an update nothing is gathered: the next forward pass would take it for the updated."""
    scheme = DataParallel(small_config(layout={"overlap_param_gather": overlap}))
    for context, gathered in ((scheme.gathered, ", gathered"), (scheme.gathered_before_update, "")):
        calls: list[str] = []
        chunks = [_Chunk("first", calls), _Chunk("second", calls)]
        with suppress(KeyError), context(chunks):
            calls.append("read")
            raise KeyError
        off = [f"{name} off{gathered}" for name in ("first", "second")] if overlap else []
        on = ["first on", "second on"] if overlap else []
        assert calls == [*off, "read", *on], "whatever happens inside"


def test_gradients_are_looked_at_once_before_their_reduction() -> None:
    """By all watchers, when those that no microbatch has given are zero."""
    seen: list[Any] = []
    a, b, c = (SimpleNamespace(main_grad=torch.full((1,), float(number))) for number in range(1, 4))
    expect_first(b.main_grad)
    buckets = [SimpleNamespace(params_list=[a]), SimpleNamespace(params_list=[b, c])]
    group: Any = SimpleNamespace(grad_reduce_handle=None, buckets=buckets)

    def look(given: list[Any]) -> None:
        seen.append([float(one.main_grad) for one in given])

    watchers: Any = [SimpleNamespace(before_reduction=look)] * 2
    start = completed(group, lambda *given, **named: seen.append(("start", given, named)), watchers)
    start(1, force_all_reduce=True)
    group.grad_reduce_handle = "under way"
    expect_first(b.main_grad.fill_(2.0))
    start()
    assert seen == [
        [1.0],
        [1.0],
        [0.0, 3.0],
        [0.0, 3.0],
        ("start", (1,), {"force_all_reduce": True}),
        ("start", (), {}),
    ]
    assert float(b.main_grad) == 2.0, "nothing is written into a reduction that is under way"


@pytest.mark.parametrize(("training", "masters"), [({"bf16": True}, torch.float32), ({}, None)])
def test_settings_of_megatron_fsdp(training: dict[str, Any], masters: torch.dtype | None) -> None:
    layout = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads", "world_size": 4}
    layout |= {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}
    settings = MegatronFSDP(small_config(layout=layout, training=training))._settings()
    assert settings.megatron_fsdp_main_params_dtype is masters
    assert settings.megatron_fsdp_main_grads_dtype == torch.float32
    names = ("data_parallel_sharding_strategy", "outer_dp_sharding_strategy", "num_distributed_optimizer_instances")
    assert [getattr(settings, name) for name in names] == ["optim_grads", "optim", 2]
    assert (settings.overlap_grad_reduce, settings.use_distributed_optimizer) == (True, True)


def _host_optimizer(sizes: list[int]) -> tuple[Any, list[torch.Tensor]]:
    tensors = [torch.full((size,), float(size)) for size in sizes]
    optimizer: Any = HostOptimizer.__new__(HostOptimizer)
    optimizer.param_groups, optimizer._pin_masters = [{"params": tensors, "lr": 0.5}], False
    return optimizer, tensors


@pytest.mark.parametrize(("fraction", "moved"), [(0.0, 0), (0.25, 1), (0.5, 1), (0.51, 2), (1.0, 3)])
def test_as_many_elements_as_asked_for_go_to_host_memory(fraction: float, moved: int) -> None:
    """The first ones, until there are enough: of 4, 2 and 2 elements."""
    optimizer, tensors = _host_optimizer([4, 2, 2])
    on_host, on_device, copies, back, _ = optimizer._get_sub_optimizer_param_groups(fraction)
    assert [one.tolist() for group in on_host for one in group["params"]] == [one.tolist() for one in tensors[:moved]]
    assert [id(one) for group in on_device for one in group["params"]] == [id(one) for one in tensors[moved:]]
    assert {group["lr"] for group in (*on_host, *on_device)} == {0.5}
    assert len(copies) == len(back) == moved


def test_copies_of_weights_follow_them_and_masters_stay() -> None:
    """Of a 16-bit weight the master in host memory is the only one."""
    optimizer, (weight, master) = _host_optimizer([3, 2])
    copies = {weight: torch.zeros(3), master: torch.zeros(2)}
    optimizer.gpu_params_map_cpu_copy, optimizer._masters = copies, {id(master)}
    optimizer.refresh()
    assert copies[weight].tolist() == [3.0] * 3
    assert copies[master].tolist() == [0.0] * 2


def test_the_first_rank_alone_makes_what_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network file system others may see an older folder."""

    def told(answer: list[Any], src: int) -> None:
        assert src == 0
        answer[0] = "of rank 0"

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", told)
    made: list[int] = []
    for rank, calls in ((1, 0), (0, 1)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        assert agreement.told_by_the_first_rank(lambda: made.append(1) or "own") == "of rank 0"
        assert len(made) == calls


@pytest.mark.parametrize(("flags", "chosen"), [({}, 1), ({"no_fallback": True}, 3)])
def test_flags_come_from_the_first_whole_checkpoint_unless_it_is_forbidden(
    flags: dict[str, Any], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = tuple(Found(Path(f"iter_{number}"), number, None) for number in (3, 1))
    monkeypatch.setattr(resume, "search_in", lambda folder, step: Search("folder", found))
    monkeypatch.setattr(resume, "_flags_are_intact", lambda path: path.name == "iter_1")
    monkeypatch.setattr(resume, "read_resume", lambda one, use_checkpoint_args: one.iteration)
    search = resume.look({"load": "folder", **flags})
    assert search is not None
    assert search.resume == chosen


@pytest.mark.parametrize(("has_masters", "first"), [(True, 2), (False, 0)])
def test_rows_of_megatrons_fsdp_are_those_that_are_updated(has_masters: bool, first: int) -> None:
    """Of the masters, where there are any: the weights that are computed with may be whole on each rank."""

    def buffer(start: int, stop: int) -> Any:
        return SimpleNamespace(param_idx={weight: 0}, _get_item_slice_in_shard=lambda index: (start, stop))

    weight = torch.nn.Parameter(torch.zeros(4, 3))
    masters, whole = buffer(6, 12) if has_masters else None, buffer(0, 12)
    group = SimpleNamespace(main_weight_buffer=masters, model_weight_buffer=whole, is_expert_param=False)
    chunk: Any = object.__new__(MegatronFSDPChunk)
    vars(chunk).update(strategy="optim", divides_copies=False)
    vars(chunk)["param_and_grad_buffer"] = SimpleNamespace(parameter_groups=[group], param_to_param_group={weight: 0})
    sharded = SimpleNamespace(orig_param=weight, _local_tensor=torch.zeros(2 if has_masters else 4, 3))
    found = chunk._rows(sharded, _groups(4))
    assert (found.first, found.shape, found.replica, found.group.name) == (first, (4, 3), 2, "intra_dp_cp")
