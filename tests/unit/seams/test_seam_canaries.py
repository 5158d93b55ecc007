"""Each of the engine's seams is as this program relies on it, in the versions that are installed."""

import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from megatron.core import utils
from megatron.core.optimizer import clip_grads
from torch._C import _distributed_c10d as c10d
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from megatron_ext.checkpoint.native.torch_archive import tensor_pickle
from megatron_ext.device.nccl_choice import VARIABLE
from megatron_ext.optim.gradient_norm import l2_norm
from megatron_ext.seams.seam import Seam, problems
from megatron_ext.seams.table import SEAMS
from megatron_ext.train import start_watchdog
from tests.support.engine_accesses import ROOT, accesses, sources

# Of the second tier: what an upgrade of the engine changes; tests/checks holds the table.
pytestmark = pytest.mark.full

BY_NAME = {seam.name: seam for seam in SEAMS}


@pytest.fixture(autouse=True)
def _functions_are_the_engines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that another test has built in this process leaves ours in their place (`optim/gradient_norm.py`)."""
    if clip_grads.l2_norm_impl is l2_norm:
        monkeypatch.setattr(clip_grads, "l2_norm_impl", utils.local_multi_tensor_l2_norm)


def _used_at(seam: Seam) -> str:
    found = {access.place for access in accesses(sources()) if access.is_covered([seam.name])}
    word = [file.path for file in sources() if seam.attribute in file.code]
    return ", ".join(sorted(found) or word)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_canary(seam: Seam) -> None:
    found = problems(seam)
    if not found and seam.name in TRIED:
        try:
            TRIED[seam.name]()
        except Exception as error:
            found = [f"does something else: {type(error).__name__}: {error}"]
    if found:
        pytest.fail(f"{seam.name} {'; '.join(found)}.\nIt is {seam.why}.\nUsed at {_used_at(seam)}", pytrace=False)


def _foreach_norm() -> None:
    [norm] = torch._foreach_norm([torch.tensor([3.0, 4.0], dtype=torch.float16)], 2, dtype=torch.float32)  # pyright: ignore
    assert (norm.item(), norm.dtype) == (5.0, torch.float32)


def _foreach_mul() -> None:
    tensors = [torch.ones(2)]
    torch._foreach_mul_(tensors, 0.5)  # pyright: ignore[reportPrivateImportUsage]
    assert tensors[0].tolist() == [0.5, 0.5]


def _hooks_in_front() -> None:
    weight, order = torch.ones(1, requires_grad=True), []
    assert weight._post_accumulate_grad_hooks is None  # pyright: ignore[reportAttributeAccessIssue]
    weight.register_post_accumulate_grad_hook(lambda _: order.append("first"))
    hooks = weight._post_accumulate_grad_hooks  # pyright: ignore[reportAttributeAccessIssue]
    taken = list(hooks.items())
    hooks.clear()
    weight.register_post_accumulate_grad_hook(lambda _: order.append("in front"))
    hooks.update(taken)
    weight.sum().backward()
    assert order == ["in front", "first"]


def _graph_task() -> None:
    ids = []
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(lambda _: ids.append(torch._C._current_graph_task_id()))
    weight.sum().backward()
    assert torch._C._current_graph_task_id() == -1 != ids[0]


def _linear_pointwise() -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch without oneDNN; device/kernels.py does without as well")
    out = torch.ops.mkldnn._linear_pointwise(torch.ones(1, 2), torch.ones(3, 2), None, "none", [], "")
    assert out.tolist() == [[2.0, 2.0, 2.0]]


def _flash_on_cpu() -> None:
    heads = [torch.zeros(1, 1, 4, 8)] * 3
    out, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads, 0.0, True, scale=1.0)
    assert torch.allclose(log_sum_exp[0, 0], torch.arange(1.0, 5.0).log())
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    parts = backward(torch.ones_like(out), *heads, out, log_sum_exp, 0.0, True, scale=1.0)
    assert [part.shape for part in parts] == [head.shape for head in heads]


def _softmax_backward_in_place() -> None:
    scores = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    softmax, grad = scores.softmax(-1), torch.arange(12.0).view(3, 4)
    (expected,) = torch.autograd.grad(softmax, scores, grad)
    torch.ops.aten._softmax_backward_data.out(grad, softmax.detach(), -1, torch.float32, grad_input=grad)
    assert torch.allclose(grad, expected, atol=1e-6)


def _start_alone() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)


def _local_tensor() -> None:
    _start_alone()
    local = torch.ones(2)
    mesh = init_device_mesh("cpu", (1,))
    sharded = DTensor.from_local(local, mesh, [Shard(0)])
    assert sharded._local_tensor.data_ptr() == local.data_ptr()


def _resolved_group() -> None:
    _start_alone()
    world = dist.group.WORLD
    assert world is not None
    assert dist.distributed_c10d._resolve_process_group(world.group_name) is world  # pyright: ignore


def _coalesced_calls() -> None:
    _start_alone()
    c10d, world = dist.distributed_c10d, dist.group.WORLD
    assert c10d._get_default_group() is world
    with c10d._coalescing_manager(world, None, True):
        dist.all_gather_into_tensor(torch.empty(2), torch.ones(2), async_op=True)
        [call] = c10d._world.pg_coalesce_state[world]  # pyright: ignore
        assert call.op.__name__ in ("all_gather_into_tensor", "all_gather_single")
        assert call.redop is None
        assert (call.tensor.tolist(), tuple(call.dst_tensor.shape)) == ([1.0, 1.0], (2,))


def _wrapped_on_the_class() -> None:
    """A method that is replaced on the class of the process groups is the one that torch calls."""
    _start_alone()
    called, genuine = [], dist.ProcessGroup.allreduce
    held = vars(dist.ProcessGroup)["allreduce"]  # what getattr makes of it would not bind to an object any more
    dist.ProcessGroup.allreduce = lambda *args: called.append(1) or genuine(*args)  # pyright: ignore
    try:
        dist.all_reduce(torch.ones(1))
    finally:
        dist.ProcessGroup.allreduce = held  # pyright: ignore[reportAttributeAccessIssue]
    assert called == [1]


def _pickled_tensor() -> None:
    file = io.BytesIO()
    torch.save(torch.zeros(2, 3), file)
    with zipfile.ZipFile(file) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("data.pkl")]
        assert archive.read(name) == tensor_pickle((2, 3), "F32")


def _memory_formats() -> None:
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    assert [(form.name, form.value) for form in _MEM_FORMAT_ENCODING] == [
        ("TORCH_CONTIGUOUS_FORMAT", 0),
        ("TORCH_CHANNELS_LAST", 1),
        ("TORCH_PRESERVE_FORMAT", 2),
    ]


def _layouts() -> None:
    assert torch.serialization._get_layout("torch.strided") is torch.strided


def _schema() -> None:
    schema = torch.ops.c10d.allreduce_.default._schema
    assert schema.name == "c10d::allreduce_"
    assert schema.arguments[0].name == "tensors"


def _result_queue() -> None:
    """What is set there is what the engine's writer gets."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    before, ours = filesystem_async._results_queue, object()
    filesystem_async._results_queue = ours  # pyright: ignore[reportAttributeAccessIssue]
    try:
        assert filesystem_async.get_write_results_queue() is ours
    finally:
        filesystem_async._results_queue = before


class _Recorded(c10d.Backend):
    """Stands for NCCL2: a backend without a recorder of its own, whose operations torch's hook records by its name."""

    def getBackendName(self) -> str:
        return "nccl2"

    def allreduce(self, tensors: list[torch.Tensor], _options: object = None) -> object:
        done = torch.futures.Future()
        done.set_result(tensors)
        return c10d._create_work_from_future(done)


def _recorded_by_name() -> None:
    """An operation of nccl2 is in the recorder of that name, which the group's backend says, and in no other."""
    dist.Backend.register_backend(
        "stand-in",
        lambda options, _: _Recorded(options.group_rank, options.group_size),  # pyright: ignore[reportCallIssue]
        extended_api=True,
        devices=["cpu"],
    )
    dist.init_process_group("stand-in", store=HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(3))
        found = {}
        for name in (start_watchdog._recording_backend(SimpleNamespace(torch_device=torch.device("cpu"))), "nccl"):  # pyright: ignore
            entries = pickle.loads(start_watchdog._flight_record(name))["entries"]
            found[name] = [entry["profiling_name"] for entry in entries]
        assert found == {"nccl2": ["nccl2:all_reduce"], "nccl": []}
    finally:
        dist.destroy_process_group()


def _chosen_nccl() -> None:
    """The variable decides when a group first asks for NCCL, whenever torch was imported."""
    program = (
        "import torch, torch.distributed; from megatron_ext import device; from megatron_ext.device import nccl_choice;"
        "device.install('cpu'); import megatron_ext.train.build;"
        "print(nccl_choice.choose({!r}), nccl_choice.in_use())"
    )
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    for name in ("nccl-legacy", "nccl2"):
        command = [sys.executable, "-c", program.format(name)]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        assert run.stdout.split() == ["None", name]


_C10D = "torch.distributed.distributed_c10d"
_CPU_ATTENTION = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"
TRIED: dict[str, Callable[[], None]] = {
    "torch._foreach_norm": _foreach_norm,
    "torch._foreach_mul_": _foreach_mul,
    "torch.Tensor._post_accumulate_grad_hooks": _hooks_in_front,
    "torch._C._current_graph_task_id": _graph_task,
    "torch.ops.mkldnn._linear_pointwise": _linear_pointwise,
    "torch.ops.aten._softmax_backward_data": _softmax_backward_in_place,
    _CPU_ATTENTION: _flash_on_cpu,
    f"{_CPU_ATTENTION}_backward": _flash_on_cpu,
    "torch.distributed.tensor.DTensor._local_tensor": _local_tensor,
    f"{_C10D}._resolve_process_group": _resolved_group,
    f"{_C10D}.Backend._plugins": _chosen_nccl,
    "torch._C._distributed_c10d._dump_fr_trace": _recorded_by_name,
    f"{_C10D}._world": _coalesced_calls,
    f"{_C10D}._coalescing_manager": _coalesced_calls,
    "torch.distributed.ProcessGroup.allreduce": _wrapped_on_the_class,
    "torch._utils._rebuild_tensor_v2": _pickled_tensor,
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _memory_formats,
    "torch.serialization._get_layout": _layouts,
    "torch._ops.OpOverload._schema": _schema,
    "megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue": _result_queue,
}
"""What a name does, where a small call shows it."""


def test_every_trial_belongs_to_a_row() -> None:
    assert set(TRIED) <= set(BY_NAME)


def test_a_name_that_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("megatron.core.dist_checkpointing.strategies.filesystem_async._results_queue")
    monkeypatch.delattr("torch._foreach_norm")
    monkeypatch.delattr("megatron.core.models.gpt.GPTModel._preprocess")
    for seam in SEAMS:
        if seam.attribute in ("_results_queue", "_foreach_norm", "_preprocess"):
            assert problems(seam)[0] == "does not exist"


def test_a_field_that_is_gone_is_noticed() -> None:
    for name in ("megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.gbuf_ranges", "parameter.main_grad"):
        seam = BY_NAME[name]
        renamed = replace(seam, name=f"{name}_of_yesterday")
        assert not problems(seam)
        assert problems(renamed), name


def test_another_signature_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def _preprocess(self, input_ids, position_ids): ...

    monkeypatch.setattr("megatron.core.models.gpt.GPTModel._preprocess", _preprocess)
    [problem] = problems(BY_NAME["megatron.core.models.gpt.gpt_model.GPTModel._preprocess"])
    assert problem == "has no parameter packed_seq_params; it has self, input_ids, position_ids"


def test_another_schema_of_an_operator_is_noticed() -> None:
    seam = BY_NAME[_CPU_ATTENTION]
    [problem] = problems(replace(seam, parameters=(*seam.parameters, "sink")))
    assert problem.startswith("has no parameter sink; it has query, key, value")


def test_a_caller_that_calls_no_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self): ...

    monkeypatch.setattr("megatron.core.models.gpt.GPTModel.forward", forward)
    found = problems(BY_NAME["megatron.core.models.gpt.gpt_model.GPTModel._preprocess"])
    assert found == ["is not used by megatron.core.models.gpt.gpt_model.GPTModel.forward any more"]


def test_a_longer_name_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that calls `_preprocess_inputs` calls `_preprocess` no more."""

    def forward(self):
        return self._preprocess_inputs(), self.no_preprocess()

    monkeypatch.setattr("megatron.core.models.gpt.GPTModel.forward", forward)
    found = problems(BY_NAME["megatron.core.models.gpt.gpt_model.GPTModel._preprocess"])
    assert found == ["is not used by megatron.core.models.gpt.gpt_model.GPTModel.forward any more"]


def test_what_only_newer_versions_have_may_be_missing() -> None:
    seam = Seam("torch.nn.Module.of_tomorrow", "a trial", newer=True)
    assert problems(seam) == []
    assert problems(replace(seam, newer=False)) == ["does not exist"]
    assert problems(replace(seam, called_by=("torch.nn.Module.nowhere",))) == [
        "was used by torch.nn.Module.nowhere, which does not exist"
    ]


def test_a_failing_canary_names_seam_reason_and_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._foreach_norm")
    with pytest.raises(pytest.fail.Exception) as failure:
        test_canary(BY_NAME["torch._foreach_norm"])
    text = str(failure.value)
    assert text.startswith("torch._foreach_norm does not exist")
    assert "Used at megatron_ext/" in text
    assert (ROOT / text.partition("Used at ")[2].partition(":")[0]).exists()
