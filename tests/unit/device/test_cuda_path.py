"""What the program asks of CUDA, seen without a GPU: stand-ins that record, and torch's fake CUDA tensors."""

import os
import shutil
import subprocess
import sys
import threading
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train

from megatron_ext import device
from megatron_ext.config.schema import LayoutConfig
from megatron_ext.device import external_kernels
from megatron_ext.device.triton import kernel_choice
from megatron_ext.model.config import transformer_config
from megatron_ext.parallel import groups
from tests.support.plain_process import plain_python
from tests.support.small_models import small_config

ROOT = Path(__file__).resolve().parents[3]
FAKE = (
    *(f"tests/support/fake_gpu{name}.py" for name in ("", "_operations", "_fp8", "_model")),
    "tests/support/interpreted_kernels.py",
)
COMPILED = "_torchdynamo_orig_callable"
"""An attribute of what torch.compile returns."""


def run_there(*flags: str) -> None:
    """Run FAKE in a process of its own: here the CPU stands in for whatever is called CUDA, and Triton compiles."""
    command = ["-m", "pytest", "--noconftest", "-p", "no:cacheprovider", *flags, *FAKE]
    ended = plain_python(command, ROOT, TRITON_INTERPRET="1")
    assert ended.code == 0, ended.output
    assert " passed" in ended.output


@pytest.mark.full
def test_on_fake_gpus_and_in_tritons_interpreter() -> None:
    run_there()


# Slow: each n-th combination is in the plain run above.
@pytest.mark.slow
def test_every_combination_on_fake_gpus_and_in_tritons_interpreter() -> None:
    run_there("-m", "slow")


class Gpu:
    """A device that says it is a GPU, and remembers what it was asked, by which thread."""

    kind = "cuda"
    backend = backend_with_host = "nccl"
    torch_device = torch.device("cuda", 3)

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_args: self.asked.append((name, threading.get_ident()))


def test_groups_connect_when_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a device_id, torch connects each at once, and sends of one group wait for each other."""
    started: list[dict[str, Any]] = []
    made: list[dict[str, Any]] = []
    here: Any = Gpu()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda **options: started.append(options))
    monkeypatch.setattr(
        groups.parallel_state,
        "initialize_model_parallel",
        lambda **options: made.append(options) or here.model_parallel(),
    )
    monkeypatch.setattr(groups, "own_groups_only", nullcontext)
    monkeypatch.setattr(groups.ProcessGroupCollection, "use_mpu_process_groups", lambda: None)
    groups.initialize(LayoutConfig(world_size=1), here)
    assert started[0]["backend"] == "nccl"
    assert started[0]["timeout"] == timedelta(minutes=10, seconds=5)  # the watch, which says who is to blame, is first
    assert started[0].get("device_id") is None
    assert [name for name, _ in here.asked] == ["bind_group", "model_parallel"], "before any barrier"
    assert made[0]["distributed_timeout_minutes"] == 10 + 5 / 60
    assert made[0]["virtual_pipeline_model_parallel_size"] is None, "megatron-core refuses 1"
    assert made[0]["create_gloo_process_groups"] is False, "as many connections again"
    groups.initialize(LayoutConfig(world_size=1, distributed_backend="gloo"), here)
    assert started[1]["backend"] == "gloo", "the flag is stronger than the device"


def test_no_synchronization_after_batched_sends() -> None:
    translated = transformer_config(small_config(layout={"pipeline_model_parallel_size": 2, "world_size": 2}), "cuda")
    assert translated.batch_p2p_comm
    assert not translated.batch_p2p_sync


@pytest.mark.parametrize(
    ("flags", "dropout", "swiglu"),
    [
        ({}, True, True),
        ({"no_bias_dropout_fusion": True}, False, True),
        ({"no_bias_swiglu_fusion": True}, True, False),
        ({"disable_jit_fuser": True}, False, False),
    ],
)
def test_fusions_on_a_gpu_can_be_switched_off(flags: dict[str, bool], dropout: bool, swiglu: bool) -> None:
    translated = transformer_config(small_config({"swiglu": True}, training=flags), "cuda")
    assert (translated.bias_dropout_fusion, translated.bias_activation_fusion) == (dropout, swiglu)
    gelu = transformer_config(small_config(training=flags), "cuda")
    assert not gelu.bias_activation_fusion


def test_megatron_cores_functions_stay_plain_where_they_are_not_to_be_fused() -> None:
    """As in every CPU process. `torch.compile` itself is torch's own again."""
    assert [hasattr(function, COMPILED) for function in (squared_relu, bias_dropout_add_fused_train)] == [False, False]
    assert hasattr(torch.compile(lambda x: x, backend="eager"), COMPILED)  # torch's compiler takes a second to import


@pytest.mark.slow  # torch's compiler changes with torch alone
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squared_relu_has_the_bits_of_the_compiled_one(dtype: torch.dtype) -> None:
    given = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    plain, compiled = squared_relu(given), torch.compile(squared_relu)(given)
    assert torch.equal(plain, compiled)
    weights = torch.randn(64, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(*(torch.autograd.grad((out * weights).sum(), given)[0] for out in (plain, compiled)))


@pytest.mark.parametrize("missing", [None, "Triton is not installed"])
@pytest.mark.parametrize("own_kernels", [True, False])
@pytest.mark.parametrize("fuses", [True, False])
def test_kernels_are_used_where_they_are_wanted_and_can_be_compiled(
    fuses: bool, own_kernels: bool, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_choice, "_used", False)
    monkeypatch.setattr(external_kernels, "missing_for_kernels", lambda: missing)
    assert device._choose_kernels(1, fuses=fuses, own_kernels=own_kernels) == (fuses and missing is None)
    assert kernel_choice._used == (own_kernels and missing is None)


def test_the_variables_of_cuda_are_set_before_torch_is_there(tmp_path: Path) -> None:
    program = (
        "import os, sys, pathlib\n"
        "from megatron_ext.device import hardware_queues\n"
        "hardware_queues._DRIVER_FILES = (pathlib.Path('/'),)\n"
        "class Watch:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch':\n"
        "            print('torch', os.environ.get('CUDA_DEVICE_MAX_CONNECTIONS'), flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "from megatron_ext.resilience.process_end import RunStatus\n"
        "from pretrain_gpt import main\n"
        "main(sys.argv[1:], RunStatus(rank=0))\n"
    )
    flags = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 1 --train-iters 1 "
        "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 60 --tensor-model-parallel-size 2"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    command = [sys.executable, "-c", program, *flags.split()]
    environment["WORLD_SIZE"] = "2"
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ran.stdout.splitlines()[-1] == "torch 1", ran.stderr
