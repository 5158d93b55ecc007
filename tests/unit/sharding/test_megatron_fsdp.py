"""What each sharding scheme hands on, keeps in memory and frees: with stand-ins for the engine."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_ext.parallel.rows import RowShard, mark, row_shard
from megatron_ext.sharding import fsdp2, megatron_fsdp
from megatron_ext.sharding.choose import sharding_of
from megatron_ext.sharding.ddp import DataParallel
from megatron_ext.sharding.fsdp2 import FSDP2, TorchFSDP
from megatron_ext.sharding.gradients import outside_norm
from megatron_ext.sharding.host_memory import InHostMemory
from megatron_ext.sharding.megatron_fsdp import MegatronFSDP, MegatronFSDPChunk, MegatronFSDPOptimizer
from megatron_ext.sharding.row_shards import RowShardOptimizer, local_gradient
from tests.support.small_models import config_of_two, small_config

CPU: Any = SimpleNamespace(torch_device=torch.device("cpu"), kind="cpu")
NOTHING: Any = None


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize(
    ("layout", "kind", "on_meta", "on_host"),
    [
        ({}, DataParallel, False, False),
        ({"use_distributed_optimizer": True}, DataParallel, False, False),
        ({"use_torch_fsdp2": True}, FSDP2, True, False),
        ({"use_torch_fsdp2": True, "torch_fsdp2_cpu_offload": True}, FSDP2, True, True),
        ({"use_megatron_fsdp": True}, MegatronFSDP, False, False),
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


class _Dense:
    """In the place of a DTensor: this rank's rows."""

    def __init__(self, rows: torch.Tensor):
        self._local_tensor = rows

    def to(self, device: Any) -> Any:
        assert device == "device"
        return _Dense(self._local_tensor.clone())


def _weight(rows: torch.Tensor, gradient: torch.Tensor | None) -> Any:
    made: Any = SimpleNamespace(grad=None if gradient is None else _Dense(gradient))
    mark(made, RowShard(rows, 0, tuple(rows.shape), None))
    return made


def test_rows_are_given_their_part_of_the_gradient() -> None:
    """All groups of them; who has had none gets zeros, and no values of the weight."""
    rows = [torch.full((2, 2), float(number)) for number in range(1, 4)]
    weights = [_weight(one, None if number == 1 else 10.0 * one) for number, one in enumerate(rows)]
    sharded: Any = RowShardOptimizer.__new__(RowShardOptimizer)
    sharded.optimizer = SimpleNamespace(param_groups=[{"params": weights[:1], "lr": 0.5}, {"params": weights[1:]}])
    sharded.take_rows(torch.bfloat16, lambda weight: ("weight of", id(weight)))
    assert sharded.prepare_grads() is False
    assert [name for name, _ in sharded.weights] == [("weight of", id(weight)) for weight in weights]
    taken = [row for group in sharded.optimizer.param_groups for row in group["params"]]
    assert [len(group["params"]) for group in sharded.optimizer.param_groups] == [1, 2]
    assert [id(row) for _, row in sharded.weights] == [id(row) for row in taken]
    assert [row.grad.tolist() for row in taken] == [[[10.0] * 2] * 2, [[0.0] * 2] * 2, [[30.0] * 2] * 2]
    assert sharded.compute_dtype == torch.bfloat16


def test_one_copy_of_rows_is_held_by_those_whose_norms_are_summed() -> None:
    """By experts' rows, too; a gradient that is divided is gathered whole."""
    core = SimpleNamespace(get_grad_stats_parallel_group=lambda: "the norm's")
    optimizer: Any = SimpleNamespace(chained_optimizers=[core])
    for scheme in (
        FSDP2(config_of_two({"use_torch_fsdp2": True})),
        MegatronFSDP(config_of_two({"use_megatron_fsdp": True})),
    ):
        assert scheme.holders_of_one_copy(optimizer, NOTHING) == ("the norm's", "the norm's")
        weight = _weight(torch.ones(2, 2), torch.full((2, 2), 3.0))
        chunk: Any = SimpleNamespace(parameters=lambda weight=weight: [weight])
        [(parameter, gradient)] = scheme.reduced_gradients(chunk)
        assert parameter is weight
        assert gradient.tolist() == [[3.0] * 2] * 2


def test_gradients_outside_of_the_norm_are_found_anew_where_more_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are as they were, and then come others."""
    counted, copy = torch.zeros(1), torch.zeros(1)
    counted.grad = torch.ones(1)
    part: Any = type("Part", (), {"get_parameters": lambda self: [counted, copy]})()
    engine = SimpleNamespace(get_grads_for_grad_norm=lambda part: [counted.grad])
    monkeypatch.setattr("megatron_ext.sharding.gradients.MegatronOptimizer", engine)
    optimizer: Any = SimpleNamespace(chained_optimizers=[part])
    assert list(outside_norm(optimizer)) == []
    copy.grad = torch.ones(1)
    assert [id(one) for one in outside_norm(optimizer)] == [id(copy.grad)]


def test_what_ddp_holds_is_in_its_buffers_and_those_of_experts() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    buffers = [SimpleNamespace(param_data=f"weights {name}", grad_data=f"gradients {name}") for name in "ab"]
    chunk: Any = SimpleNamespace(
        parameters=lambda: iter([parameter]), buffers=buffers[:1], expert_parallel_buffers=buffers[1:]
    )
    scheme = DataParallel(small_config())
    first, *others = scheme.held_weights(chunk)
    assert first is not None
    assert first.data_ptr() == parameter.data_ptr()
    assert others == ["weights a", "weights b"]
    assert list(scheme.held_gradients(chunk)) == [parameter.grad, "gradients a", "gradients b"]


def test_hooks_of_modules_without_weights_stay_off_after_a_look_at_the_weights() -> None:
    """The engine hooks every module anew. Both ways of looking."""
    scheme = DataParallel(small_config(layout={"overlap_param_gather": True, "world_size": 2}))
    for context in (scheme.gathered, scheme.gathered_before_update):
        ran: list[str] = []
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        chunk: Any = SimpleNamespace(remove_forward_pre_hook_handles={})

        def enable(chunk: Any = chunk, model: torch.nn.Module = model, ran: list[str] = ran) -> None:
            chunk.remove_forward_pre_hook_handles = {
                one: one.register_forward_pre_hook(lambda one, _: ran.append(type(one).__name__))
                for one in model.modules()
            }

        chunk.enable_forward_pre_hook, chunk.disable_forward_pre_hook = enable, lambda param_sync=True: None
        with context([chunk]):
            pass
        model(torch.zeros(1, 2))
        assert ran == ["Linear"]


def test_gradients_in_host_memory_wait_on_the_device_for_the_sum_over_tensor_ranks() -> None:
    """What was added up there is what is scaled; the others are where they are. Nothing is kept for the next step."""
    copies, divided, idle = (_weight(torch.zeros(2), torch.full((2,), 3.0)) for _ in range(3))
    idle.grad = None
    chunk: Any = TorchFSDP.__new__(TorchFSDP)
    torch.nn.Module.__init__(chunk)
    chunk._device, chunk._added_over_tensor_ranks = "device", [copies, idle]
    chunk.parameters = lambda: iter([copies, divided, idle])
    chunk.finish_grad_sync()
    assert not hasattr(divided, "main_grad")
    assert not hasattr(idle, "main_grad")
    copies.main_grad._local_tensor += 5.0  # by the other tensor-parallel ranks
    chunk.scale_gradients(torch.tensor(0.5))
    assert [local_gradient(one).tolist() for one in (copies, divided)] == [[4.0] * 2, [1.5] * 2]
    assert not hasattr(copies, "main_grad")
    chunk.zero_grad_buffer()
    assert [one.grad for one in (copies, divided)] == [None, None]


def test_an_action_of_the_first_forward_pass_is_done_once() -> None:
    done: list[Any] = []
    module = torch.nn.Linear(1, 1)
    fsdp2._at_first_forward(module, done.append)
    for _ in range(3):
        module(torch.zeros(1, 1))
    assert done == [module]


@pytest.mark.parametrize("on_host", [False, True])
def test_who_clips_under_torchs_fsdp(on_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients in host memory each part scales itself."""
    done: list[Any] = []
    monkeypatch.setattr(fsdp2.RowSharding, "clip", lambda self, *given: done.append(given))
    parts = [SimpleNamespace(clip=lambda *given, n=n: done.append((n, *given))) for n in range(2)]
    optimizer: Any = SimpleNamespace(chained_optimizers=parts)
    scheme = FSDP2(config_of_two({"use_torch_fsdp2": True, "torch_fsdp2_cpu_offload": on_host}))
    scheme.clip(optimizer, 2.0, 5.0)
    assert done == ([(0, 2.0, 5.0), (1, 2.0, 5.0)] if on_host else [(optimizer, 2.0, 5.0)])


class _Layer(TransformerLayer):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


class _Embedding(LanguageModelEmbedding):
    def __init__(self) -> None:
        torch.nn.Module.__init__(self)


class _Model(torch.nn.Module):
    def __init__(self, *, ends: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.layer = _Layer()
        if ends:
            self.embedding = _Embedding()
            self.output_layer = torch.nn.Linear(2, 2, bias=False)
            if tied:
                self.output_layer.register_parameter("weight", None)


@pytest.mark.parametrize("tied", [False, True])
def test_tied_embeddings_are_in_no_unit_of_their_own(tied: bool) -> None:
    """They are needed at both ends of a forward pass. Inner modules come first, the model last."""
    model = _Model(tied=tied)
    expected = [model.layer, *([] if tied else [model.embedding]), model]
    assert fsdp2._units(model, tied=tied) == expected
    kinds = [TransformerLayer, *([] if tied else [LanguageModelEmbedding, torch.nn.Linear])]
    assert megatron_fsdp._units(model) == kinds
    assert megatron_fsdp._units(_Model(ends=False)) == [TransformerLayer]


def test_megatron_fsdp_is_wired_into_the_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module reads the weight of the output layer by itself: it may not be gathered then."""
    models = [SimpleNamespace(reads_output_weight=True, name=name) for name in "ab"]
    monkeypatch.setattr(megatron_fsdp, "unwrapped", lambda chunks: list(chunks))
    monkeypatch.setattr(megatron_fsdp, "initialized", lambda chunks, *given: [*chunks, given][:2])
    monkeypatch.setattr(
        megatron_fsdp,
        "MegatronFSDPChunk",
        lambda core, settings, chunk, groups, device: SimpleNamespace(
            no_sync=f"no_sync {chunk.name}", start_grad_sync=f"start {chunk.name}", given=(core, groups, device)
        ),
    )
    core: Any = SimpleNamespace()
    groups: Any = "groups"
    given: Any = models
    wrapped: Any = MegatronFSDP(config_of_two({"use_megatron_fsdp": True})).shard(given, core, groups, CPU)
    assert [one.reads_output_weight for one in models] == [False, False]
    assert core.no_sync_func == ["no_sync a", "no_sync b"]
    assert core.grad_sync_func == ["start a", "start b"]
    assert [one.given for one in wrapped] == [(core, "groups", CPU.torch_device)] * 2


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads", "optim_grads_params"])
def test_nothing_that_was_gathered_is_kept(strategy: str) -> None:
    """Between steps and after an evaluation, where weights are divided."""
    done: list[Any] = []
    fsdp = SimpleNamespace(
        finish_grad_sync=lambda force: done.append(("finish", force)),
        all_gather_pipeline=SimpleNamespace(reset=lambda **named: done.append(named)),
    )
    frees = [{"preserve_non_fsdp_units": False}] if strategy == "optim_grads_params" else []

    @contextmanager
    def raw() -> Iterator[None]:
        done.append("weights")
        yield
        done.append("shards")

    chunk: Any = SimpleNamespace(strategy=strategy, module=fsdp, raw_parameters=raw)
    chunk.free_gathered = lambda: MegatronFSDPChunk.free_gathered(chunk)
    MegatronFSDPChunk._finish_grad_sync(chunk, True)
    assert done == [("finish", True), *frees]
    done.clear()
    scheme = MegatronFSDP(config_of_two({"use_megatron_fsdp": True}))
    with scheme.gathered([chunk, chunk]):
        done.append("read")
    assert done == ["weights", "weights", "read", "shards", "shards", *frees, *frees]


def test_the_modules_have_their_weights_meanwhile() -> None:
    """Whatever happens inside; a state dict that is asked for does not put the shards back."""
    seen: list[bool] = []
    fsdp = SimpleNamespace(is_param_fsdp_distributed=False)
    fsdp._replace_param_with_raw_if_needed = lambda: seen.append(fsdp.is_param_fsdp_distributed)
    chunk: Any = SimpleNamespace(module=fsdp)
    with suppress(KeyError), MegatronFSDPChunk.raw_parameters(chunk):
        assert fsdp.is_param_fsdp_distributed
        fsdp.is_param_fsdp_distributed = False
        raise KeyError
    assert seen == [False, True]


def test_what_megatron_fsdp_holds() -> None:
    """Its buffers, what is gathered in them, and where copies are divided, the second ones; where there are any."""

    def buffer(name: str, gathered: int = 0) -> Any:
        buckets = {number: SimpleNamespace(data=f"{name} gathered {number}") for number in range(gathered)}
        return SimpleNamespace(data=name, temporary_bucket_allocator=SimpleNamespace(buckets=buckets))

    groups = [
        SimpleNamespace(
            params=[SimpleNamespace(data="weight")],
            model_weight_buffer=buffer("weights", 2),
            hfsdp_helper_wbuf=buffer("second weights"),
            main_grad_buffer=buffer("gradients", 1),
            hfsdp_helper_gbuf=buffer("second gradients"),
        ),
        SimpleNamespace(
            params=[],
            model_weight_buffer=None,
            hfsdp_helper_wbuf=None,
            main_grad_buffer=SimpleNamespace(data="plain", temporary_bucket_allocator=None),
            hfsdp_helper_gbuf=None,
        ),
    ]
    chunk: Any = MegatronFSDPChunk.__new__(MegatronFSDPChunk)
    object.__setattr__(chunk, "__dict__", {"param_and_grad_buffer": SimpleNamespace(parameter_groups=groups)})
    scheme = MegatronFSDP(config_of_two({"use_megatron_fsdp": True}))
    gathered = [f"weights gathered {number}" for number in range(2)]
    assert list(scheme.held_weights(chunk)) == ["weight", "weights", *gathered, "second weights"]
    expected = ["gradients", "gradients gathered 0", "second gradients", "plain"]
    assert list(scheme.held_gradients(chunk)) == expected


@pytest.mark.parametrize(("precision", "dtype"), [({}, torch.float32), ({"bf16": True}, torch.bfloat16)])
def test_the_optimizer_of_megatron_fsdp_is_over_rows(
    precision: dict[str, Any], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        megatron_fsdp, "build_optimizer", lambda chunks, settings, *_: given.append(settings) or "built"
    )
    monkeypatch.setattr(megatron_fsdp, "MegatronFSDPOptimizer", lambda *given: given)
    monkeypatch.setattr(megatron_fsdp, "ChainedOptimizer", list)
    config = small_config(layout={"use_megatron_fsdp": True, "world_size": 2}, training=precision)
    groups: Any = "groups"
    assert MegatronFSDP(config).optimizer(["chunk"], groups, CPU) == [("built", ["chunk"], dtype, "groups")]
    assert given[0].use_distributed_optimizer


def test_the_rows_of_megatron_fsdp_are_over_the_groups_of_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        megatron_fsdp.DistributedOptimizer, "__init__", lambda self, *given, **named: asked.append((given, named))
    )
    monkeypatch.setattr(
        MegatronFSDPOptimizer, "take_rows", lambda self, dtype, weight_of: asked.append((dtype, weight_of))
    )
    inner: Any = SimpleNamespace(optimizer="inner", config="config", grad_scaler="scaler", init_state_fn="init")
    groups: Any = SimpleNamespace(dp_cp="dp_cp", tp="tp", mp="mp", intra_dist_opt="one copy")
    chunk: Any = SimpleNamespace(divides_copies=False, strategy="optim_grads")
    made: Any = MegatronFSDPOptimizer(inner, [chunk], torch.bfloat16, groups)
    (arguments, named), rows = asked
    assert arguments == ("inner", "config", "scaler", "init", [chunk])
    assert named["data_parallel_group"] == "dp_cp"
    assert rows == (torch.bfloat16, megatron_fsdp.weight_of)
    assert (made.grad_stats_parallel_group, made.tp_group, made.expert_tp_group) == ("one copy", "tp", "tp")


def test_rows_know_where_they_end_by_their_first_axis() -> None:
    shard = RowShard(torch.zeros(2, 5), 3, (8, 5), None)
    assert shard.stop == 5
    weight: Any = SimpleNamespace()
    mark(weight, shard)
    assert row_shard(weight) is shard
