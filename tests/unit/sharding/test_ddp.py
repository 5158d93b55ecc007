"""What a sharding scheme asks of megatron-core and torch, by stand-ins of them: hooks, groups, types, and whose
gradients are whose."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import layers

from megatron_ext.device.weight_gradients import ProductsOfTorch, takes_first
from megatron_ext.sharding import ddp, engine, fsdp2, megatron_fsdp, row_shards
from megatron_ext.sharding.ddp import DataParallel, _finish_gather
from megatron_ext.sharding.fsdp2 import FSDP2, TorchFSDP
from megatron_ext.sharding.gradient_buffers import WritingDataParallel
from megatron_ext.sharding.gradients import gradients_of_update, outside_norm
from megatron_ext.sharding.host_memory import HostOptimizer, InHostMemory
from megatron_ext.sharding.megatron_fsdp import MegatronFSDPChunk
from megatron_ext.sharding.parts import OptimizerPart
from megatron_ext.sharding.row_shards import RowShardOptimizer
from tests.support.small_models import small_config

CPU: Any = SimpleNamespace(torch_device=torch.device("cpu"), kind="cpu")


class _Wrapped:
    """In the place of megatron-core's DDP."""

    def __init__(
        self, *, writes: bool, config: Any, ddp_config: Any, module: Any, pg_collection: Any, disable_bucketing: bool
    ):
        self.module, self.one_bucket, self.writes = module, disable_bucketing, writes
        self.given = config, ddp_config, pg_collection
        self.remove_forward_pre_hook_handles: dict[Any, Any] = {}

    def no_sync(self) -> None: ...
    def start_grad_sync(self) -> None: ...
    def start_param_sync(self) -> None: ...


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(("overlap", "gathers"), [(False, False), (True, False), (True, True)])
def test_the_schedule_knows_when_to_reduce_and_to_gather(
    overlap: bool, gathers: bool, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function for one chunk, a list for several; later chunks of a stage reduce in one bucket."""
    monkeypatch.setattr(ddp, "WritingDataParallel", _Wrapped)
    monkeypatch.setattr(ddp, "initialized", lambda chunks, *_: list(chunks))
    layout = {
        "world_size": 2,
        "use_distributed_optimizer": True,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": gathers,
    }
    core: Any = SimpleNamespace(no_sync_func=None, grad_sync_func=None, param_sync_func=None)
    modules: Any = [SimpleNamespace(before_output=None) for _ in range(chunks)]
    groups: Any = "groups"
    wrapped: Any = DataParallel(small_config(layout=layout)).shard(modules, core, groups, CPU)
    assert [one.module for one in wrapped] == modules
    assert [one.one_bucket for one in wrapped] == [False, True][:chunks]
    assert all(one.given[0] is core and one.given[2] == "groups" for one in wrapped)

    def of_chunks(name: str) -> Any:
        found = [getattr(one, name) for one in wrapped]
        return found if chunks > 1 else found[0]

    assert core.no_sync_func == (of_chunks("no_sync") if overlap else None)
    assert core.grad_sync_func == (of_chunks("start_grad_sync") if overlap else None)
    assert core.param_sync_func == (of_chunks("start_param_sync") if gathers else None)
    for one in wrapped:
        hook = one.module.before_output
        assert hook is None if not gathers else (hook.func, hook.args) == (_finish_gather, (one,))


def test_modules_without_weights_wait_for_none() -> None:
    """All of the hooks can still be removed by their handles, as megatron-core does."""
    ran: list[str] = []
    weighted, plain = torch.nn.Linear(2, 2), torch.nn.ReLU()
    model = torch.nn.Sequential(weighted, plain)
    handles = {
        module: module.register_forward_pre_hook(lambda module, _inputs: ran.append(type(module).__name__))
        for module in model.modules()
    }
    model(torch.zeros(1, 2))
    assert ran == ["Sequential", "Linear", "ReLU"]
    ddp._unhook_modules_without_weights(SimpleNamespace(remove_forward_pre_hook_handles=handles))
    model(torch.zeros(1, 2))
    assert ran[3:] == ["Linear"]
    for handle in handles.values():
        handle.remove()
    model(torch.zeros(1, 2))
    assert len(ran) == 4


def test_a_weight_that_is_read_alone_is_gathered_first() -> None:
    """The module's own weights, unless the hooks are off."""
    finished: list[str] = []
    module = torch.nn.Linear(2, 2)
    inner = torch.nn.Sequential(module)
    bucket = {
        weight: SimpleNamespace(finish_param_sync=lambda name=name: finished.append(name))
        for name, weight in module.named_parameters()
    }
    chunk: Any = SimpleNamespace(remove_forward_pre_hook_handles={module: 1, inner: 2}, param_to_bucket_group=bucket)
    _finish_gather(chunk, inner)
    assert finished == []
    _finish_gather(chunk, module)
    assert finished == ["weight", "bias"]
    chunk.remove_forward_pre_hook_handles = {}
    _finish_gather(chunk, module)
    assert len(finished) == 2


def _bucket(parameters: list[torch.nn.Parameter], first: float) -> Any:
    """A bucket whose gradients are numbers from `first` on."""
    ends = torch.tensor([0, *(parameter.numel() for parameter in parameters)]).cumsum(0).tolist()
    places = {parameter: (ends[n], ends[n + 1]) for n, parameter in enumerate(parameters)}
    return SimpleNamespace(
        params_list=parameters, param_to_index=places, grad_data=torch.arange(first, first + ends[-1])
    )


@pytest.mark.parametrize("distributed", [False, True])
def test_reduced_gradients_are_those_of_all_shards(distributed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense ones are shared by a group, experts' by another one. Rank 1 of two has reduced the second half."""
    dense = [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(4))]
    experts = [torch.nn.Parameter(torch.zeros(2))]
    asked: list[tuple[str, list[float]]] = []

    def gather(whole: torch.Tensor, own: torch.Tensor, group: Any) -> None:
        asked.append((group.name, own.tolist()))
        whole.copy_(torch.arange(100.0, 100.0 + whole.numel()))

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    groups = {name: SimpleNamespace(name=name, size=lambda: 2, rank=lambda: 1) for name in ("dense", "experts")}
    chunk = SimpleNamespace(
        bucket_groups=[SimpleNamespace(buckets=[_bucket(dense, 0.0)])],
        expert_parallel_bucket_groups=[SimpleNamespace(buckets=[_bucket(experts, 50.0)])],
        intra_dp_cp_group=groups["dense"],
        intra_expt_dp_group=groups["experts"],
        ddp_config=SimpleNamespace(use_distributed_optimizer=distributed),
    )
    scheme = DataParallel(small_config())
    found = list(scheme.reduced_gradients(chunk))
    assert [parameter for parameter, _ in found] == [*dense, *experts]
    first = 100.0 if distributed else 0.0
    assert found[0][1].tolist() == [[first, first + 1], [first + 2, first + 3]]
    assert found[1][1].tolist() == [first + 4, first + 5, first + 6, first + 7]
    assert found[2][1].tolist() == ([100.0, 101.0] if distributed else [50.0, 51.0])
    assert asked == ([("dense", [4.0, 5.0, 6.0, 7.0]), ("experts", [51.0])] if distributed else [])


@pytest.mark.parametrize("writes", [True, False])
def test_experts_have_buffers_too(writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are watched, and nobody zeroes them, unless a package's kernel adds to whatever is there."""
    done: list[Any] = []

    def parts(name: str) -> tuple[Any, Any]:
        parameters = [SimpleNamespace(main_grad=torch.ones(1), name=name)]
        group = SimpleNamespace(
            grad_reduce_handle=None,
            buckets=[SimpleNamespace(params_list=parameters)],
            start_grad_sync=lambda: done.append(f"reduce {name}"),
        )
        return SimpleNamespace(params=parameters, reset=lambda: done.append(f"zero {name}")), group

    def of_engine(self: Any) -> None:
        torch.nn.Module.__init__(self)
        buffers, bucket_groups = zip(parts("dense"), parts("experts"), strict=True)
        self.buffers, self.expert_parallel_buffers = [buffers[0]], [buffers[1]]
        self.bucket_groups, self.expert_parallel_bucket_groups = [bucket_groups[0]], [bucket_groups[1]]

    monkeypatch.setattr(DistributedDataParallel, "__init__", of_engine)
    chunk: Any = WritingDataParallel(writes=writes)
    watcher: Any = SimpleNamespace(register=done.append, before_reduction=lambda given: done.append(given[0].name))
    DataParallel(small_config()).watch(chunk, watcher)
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        buffer.reset()
    expected = [takes_first(buffer.params[0].main_grad) for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
        group.start_grad_sync()
    assert expected == [writes, writes]
    zeroed = [] if writes else ["zero dense", "zero experts"]
    assert done == [chunk, *zeroed, "dense", "reduce dense", "experts", "reduce experts"]


@pytest.mark.parametrize(("fused", "ours", "writes"), [(False, False, True), (True, True, True), (True, False, False)])
def test_apexs_kernels_find_zeros(fused: bool, ours: bool, writes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "WritingDataParallel", _Wrapped)
    monkeypatch.setattr(ddp, "initialized", lambda chunks, *_: list(chunks))
    monkeypatch.setattr(layers, "fused_weight_gradient_mlp_cuda", ProductsOfTorch if ours else "apex", raising=False)
    config, nothing = small_config(training={"gradient_accumulation_fusion": fused}), SimpleNamespace()
    [wrapped] = DataParallel(config).shard([nothing], nothing, nothing, CPU)  # pyright: ignore
    assert wrapped.writes is writes  # pyright: ignore[reportAttributeAccessIssue]


def test_gradients_that_are_not_in_the_norm_are_looked_at_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, which the norm counts on another rank; and of weights without a gradient nothing."""
    counted, copy, idle = (torch.zeros(1) for _ in range(3))
    counted.grad, copy.grad = torch.ones(1), torch.ones(1)
    part: Any = type("Part", (), {"get_parameters": lambda self: [counted, copy, idle]})()
    engine = SimpleNamespace(get_grads_for_grad_norm=lambda part: [counted.grad])
    monkeypatch.setattr("megatron_ext.sharding.gradients.MegatronOptimizer", engine)
    optimizer: Any = SimpleNamespace(chained_optimizers=[part])
    for _ in range(2):  # what is left out is remembered
        [found] = outside_norm(optimizer)
        assert found is copy.grad
    copy.grad = torch.ones(1)
    [found] = outside_norm(optimizer)
    assert found is copy.grad, "the gradients of the next step"
    counted.grad = None
    assert [id(one) for one in outside_norm(optimizer)] == [id(copy.grad)], "fewer have a gradient: it is found anew"
    counted.grad = torch.ones(1)
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(3)]
    mains = list(zip(weights, (counted, copy, idle), strict=True))
    parts: Any = [SimpleNamespace(main_parameters=lambda: iter(mains))]
    assert [
        (weight is mains[n][0], gradient is mains[n][1].grad)
        for n, (weight, gradient) in enumerate(gradients_of_update(parts))
    ] == [(True, True)] * 2


def test_masters_are_saved_of_16_bit_weights_alone() -> None:
    core: Any = SimpleNamespace(optimizer=None)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        saves = OptimizerPart(core).saves_master(torch.nn.Parameter(torch.zeros(1, dtype=dtype)))
        assert saves == (dtype != torch.float32)


@pytest.mark.parametrize("training", [{"bf16": True}, {}])
def test_rows_are_updated_in_fp32_whatever_is_computed_with(
    training: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's masters would be copies of the rows, which are masters."""
    asked: list[Any] = []

    def build(chunks: Any, settings: Any, config: Any, groups: Any) -> Any:
        asked.append(settings)
        return SimpleNamespace(chained_optimizers=["one", "other"])

    monkeypatch.setattr(fsdp2, "build_optimizer", build)
    monkeypatch.setattr(fsdp2, "ChainedOptimizer", list)
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(fsdp2, "RowShardOptimizer", lambda inner, **named: made.append({"of": inner, **named}) or inner)
    scheme = FSDP2(small_config(layout={"use_torch_fsdp2": True, "world_size": 2}, training=training))
    groups: Any = "groups"
    assert scheme.optimizer([], groups, CPU) == ["one", "other"]
    assert not asked[0].bf16
    dtype = torch.bfloat16 if training else torch.float32
    assert made == [{"of": name, "compute_dtype": dtype, "groups": "groups"} for name in ("one", "other")]


def test_the_norm_of_rows_is_over_those_that_hold_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_shards.FP32Optimizer, "__init__", lambda self, *given: None)
    monkeypatch.setattr(RowShardOptimizer, "take_rows", lambda self, dtype, weight_of: None)
    inner: Any = SimpleNamespace(optimizer=None, config=None, init_state_fn=None)
    groups: Any = SimpleNamespace(intra_dist_opt="one copy", tp="tp", mp="mp", dp_cp="dp_cp")
    made: Any = RowShardOptimizer(inner, torch.float32, groups)
    assert (made.grad_stats_parallel_group, made.tp_group, made.expert_tp_group) == ("one copy", "tp", "tp")


class _Model(torch.nn.Module):
    """In the place of a model: two layers, of which the last holds a copy that tensor-parallel ranks have too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 2, bias=False), torch.nn.Linear(2, 2, bias=False)
        marked: Any = self.first.weight
        marked.tensor_model_parallel = True


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize(("tensor", "offload"), [(1, False), (2, False), (1, True), (2, True)])
def test_what_torchs_fsdp_is_asked_for(
    tensor: int, offload: bool, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums in fp32 that nothing divides; the order of the backward pass where a forward pass is repeated."""
    asked: list[tuple[Any, dict[str, Any]]] = []
    done: list[tuple[str, Any]] = []

    class _Unit:
        def set_gradient_divide_factor(self, factor: float) -> None:
            done.append(("divide", factor))

        def set_force_sum_reduction_for_comms(self, force: bool) -> None:
            done.append(("sum", force))

        def set_modules_to_backward_prefetch(self, before: list[Any]) -> None:
            done.append(("prefetch", len(before)))

    units: list[Any] = [_Unit(), _Unit()]
    monkeypatch.setattr(fsdp2, "_BaseDataParallel", SimpleNamespace(__init__=lambda self, config, module: None))
    monkeypatch.setattr(fsdp2, "_units", lambda module, tied: [*units, module])
    monkeypatch.setattr(fsdp2, "_mesh", lambda groups, kind: (groups, kind))
    monkeypatch.setattr(fsdp2, "FSDPModule", (_Unit, _Model))
    monkeypatch.setattr(fsdp2, "DTensor", torch.nn.Parameter)
    monkeypatch.setattr(fsdp2, "_rows", lambda parameter, groups: "rows")
    model: Any = _Model()

    def shard(unit: Any, **named: Any) -> None:
        """Put another parameter in the place of each, as torch does."""
        asked.append((unit, named))
        if unit is model:
            for layer in (model.first, model.second):
                layer.weight = torch.nn.Parameter(layer.weight.detach())

    monkeypatch.setattr(fsdp2, "fully_shard", shard)
    model.set_gradient_divide_factor = _Unit.set_gradient_divide_factor.__get__(model)
    model.set_force_sum_reduction_for_comms = _Unit.set_force_sum_reduction_for_comms.__get__(model)
    layout = {"use_torch_fsdp2": True, "torch_fsdp2_cpu_offload": offload, "world_size": 2}
    core: Any = SimpleNamespace(params_dtype=torch.bfloat16, recompute_granularity="full" if recomputes else None)
    groups: Any = SimpleNamespace(tp=SimpleNamespace(size=lambda: tensor))
    sharded: Any = TorchFSDP.__new__(TorchFSDP)
    settings: Any = "settings"
    torch.nn.Module.__init__(sharded)
    sharded.__init__(
        small_config(layout=layout, training={"bf16": True}), core, settings, model, groups, torch.device("cpu")
    )
    assert [unit for unit, _ in asked] == [*units, model]
    for _, named in asked:
        policy = named["mp_policy"]
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
        assert not policy.cast_forward_inputs
        assert named["mesh"] == (groups, "cpu")
        assert named["reshard_after_forward"]
        assert isinstance(named["offload_policy"], fsdp2.CPUOffloadPolicy) == offload
    prefetch = [("prefetch", 0), ("prefetch", 1)] if recomputes else []
    assert [one for one in done if one[0] == "prefetch"] == prefetch
    assert done.count(("divide", 1.0)) == done.count(("sum", True)) == 3
    waiting = [model.second.weight] if offload and tensor > 1 else []
    assert [id(one) for one in sharded._added_over_tensor_ranks] == [id(one) for one in waiting]
    assert model.first.weight.tensor_model_parallel
    assert model.first.weight.row_shard == "rows"


def test_a_masters_memory_is_freed_between_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is there again during one; a weight that is its own master stays."""
    master = torch.ones(3)
    optimizer: Any = HostOptimizer.__new__(HostOptimizer)
    optimizer._away = [master]
    optimizer.release()
    assert master.untyped_storage().size() == 0
    seen: list[int] = []
    monkeypatch.setattr(
        "megatron_ext.sharding.host_memory.HybridDeviceOptimizer.step",
        lambda self, closure: seen.append(master.untyped_storage().size()),
    )
    optimizer.step()
    assert seen == [12]


def test_masters_begin_as_the_weights_that_were_loaded() -> None:
    """Of a 16-bit weight the rows that this rank updates; a weight in fp32 is its own, and host copies follow."""
    short, long = torch.nn.Parameter(torch.tensor([1.0, 2.0]).bfloat16()), torch.nn.Parameter(torch.tensor([3.0]))
    masters = {"short": torch.zeros(1), "long": torch.zeros(1)}
    mains = {"short": torch.zeros(1), "long": torch.zeros(1)}
    refreshed: list[bool] = []
    updater = SimpleNamespace(
        master_of=lambda main: masters["short" if main is mains["short"] else "long"],
        refresh=lambda: refreshed.append(True),
    )
    part = SimpleNamespace(
        core=SimpleNamespace(optimizer=updater),
        main_parameters=lambda: [(short, mains["short"]), (long, mains["long"])],
        own=lambda weight, values: values[1:],
    )
    scheme: Any = SimpleNamespace(
        config=small_config(), builds_on_meta=False, lives_on_host=False, parts=lambda optimizer: [part]
    )
    optimizer: Any = None
    InHostMemory(scheme).reload_masters(optimizer)
    assert (masters["short"].tolist(), masters["long"].tolist(), refreshed) == ([2.0], [0.0], [True])


@pytest.mark.parametrize("dtypes", [[], [torch.float32], [torch.float32, torch.float16], [torch.bfloat16] * 2])
def test_host_copies_follow_once_whatever_the_weights_are(dtypes: list[torch.dtype]) -> None:
    """fp32 weights have no masters: their copies in host memory are what the next update begins with."""
    done: list[str] = []
    pairs = [(torch.nn.Parameter(torch.ones(1, dtype=dtype)), torch.zeros(1)) for dtype in dtypes]

    def master_of(main: torch.Tensor) -> torch.Tensor:
        done.append("master")
        return main

    updater = SimpleNamespace(master_of=master_of, refresh=lambda: done.append("refresh"))
    part = SimpleNamespace(
        core=SimpleNamespace(optimizer=updater), main_parameters=lambda: pairs, own=lambda weight, values: values
    )
    scheme: Any = SimpleNamespace(
        config=small_config(), builds_on_meta=False, lives_on_host=False, parts=lambda optimizer: [part]
    )
    optimizer: Any = None
    InHostMemory(scheme).reload_masters(optimizer)
    masters = sum(dtype != torch.float32 for dtype in dtypes)
    assert done == [*["master"] * masters, "refresh"]


@pytest.mark.parametrize(("training", "wrapped"), [({}, False), ({"bf16": True}, True), ({"fp16": True}, True)])
def test_chunks_are_on_the_device_before_they_begin(
    training: dict[str, Any], wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in the wrapper of 16-bit training, under which the first weights are found."""
    done: list[Any] = []
    chunks: Any = [SimpleNamespace(to=lambda device, n=n: done.append((n, device))) for n in range(2)]
    monkeypatch.setattr(engine, "Float16Module", lambda core, chunk: ("16 bits", core, chunk))
    monkeypatch.setattr(engine, "initialize", lambda chunks, config, groups: done.append((list(chunks), groups)))
    core: Any = "settings"
    groups: Any = "groups"
    found = engine.initialized(chunks, small_config(training=training), core, groups, CPU)
    expected = [("16 bits", "settings", chunk) for chunk in chunks] if wrapped else chunks
    assert found == expected
    assert done == [(0, CPU.torch_device), (1, CPU.torch_device), (expected, "groups")]


def test_parts_without_anything_to_update_are_left_out() -> None:
    optimizer: Any = SimpleNamespace(
        chained_optimizers=[SimpleNamespace(optimizer="one"), SimpleNamespace(optimizer=None)]
    )
    kind: Any = lambda core: ("part", core.optimizer)  # noqa: E731
    assert engine.updating(optimizer, kind) == [("part", "one")]
    assert engine.for_chunks(["alone"]) == "alone"
    assert engine.for_chunks(["first", "second"]) == ["first", "second"]


def test_what_updates_is_the_registered_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each of the engine's, but for those that have nothing to update; norms and clipping are ours."""
    done: list[str] = []
    parts = [SimpleNamespace(optimizer="built"), SimpleNamespace(optimizer=None)]
    several = SimpleNamespace(chained_optimizers=parts)
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(engine, "replace_loops", lambda: done.append("loops"))
    monkeypatch.setattr(engine, "as_registered", lambda built, config: ("registered", built, config))
    monkeypatch.setattr(
        engine, "get_megatron_optimizer", lambda settings, modules, **named: asked.append(named) or several
    )
    given: tuple[Any, Any, Any, Any] = (["chunk"], "settings", "config", "groups")
    assert engine.build_optimizer(*given) is several
    assert done == ["loops"]
    assert asked == [{"use_gloo_process_groups": False, "pg_collection": "groups"}]
    assert [part.optimizer for part in parts] == [("registered", "built", "config"), None]


def test_shards_of_experts_are_marked_as_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By megatron-core's mark, where the weight has it: their gradients are added up over ranks of their own."""
    weights: list[Any] = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    weights[0].allreduce, weights[1].allreduce = False, True
    shards: list[Any] = [SimpleNamespace(of=weight) for weight in weights]
    asked: list[Any] = []

    def build(self: Any, core: Any, settings: Any, module: Any, units: Any, **named: Any) -> None:
        asked.append((core, units, named))

    monkeypatch.setattr(megatron_fsdp.FullyShardedDataParallel, "__init__", build)
    monkeypatch.setattr(MegatronFSDPChunk, "sharded_parameters", lambda self: iter(shards))
    monkeypatch.setattr(MegatronFSDPChunk, "_rows", lambda self, sharded, groups: ("rows", groups))
    monkeypatch.setattr(MegatronFSDPChunk, "__setattr__", object.__setattr__)
    monkeypatch.setattr(megatron_fsdp, "weight_of", lambda sharded: sharded.of)
    monkeypatch.setattr(megatron_fsdp, "_units", lambda module: ["unit"])
    for strategy, units, outer in (("optim_grads_params", ["unit"], "optim"), ("optim_grads", [], "no_shard")):
        settings = SimpleNamespace(data_parallel_sharding_strategy=strategy, outer_dp_sharding_strategy=outer)
        given: Any = ("core", settings, torch.nn.Linear(1, 1), "groups", "device")
        chunk = MegatronFSDPChunk(*given)
        assert asked[-1] == ("core", units, {"device": "device", "pg_collection": "groups"})
        assert (chunk.strategy, chunk.divides_copies) == (strategy, outer == "optim")
    assert [getattr(shard, "allreduce", None) for shard in shards] == [False, True, None]
    assert [one.row_shard for one in (*shards, *weights)] == [("rows", "groups")] * 6
