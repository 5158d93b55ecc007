"""What is read from the words of nvidia-smi and of the driver, and why torch can use no GPU that a driver shows."""

from pathlib import Path

import pytest
import torch

from megatron_ext.device import gpu_inventory
from megatron_ext.device.gpu_inventory import Gpu, Survey, obstacle
from tests.support.program import tiny
from tests.support.stand_in_driver import run_with_driver, write_driver


def test_links_of_sixteen_gpus_are_by_pairs() -> None:
    """Each pair once, by numbers of two digits too; other devices of the matrix are none."""
    names = [f"GPU{number}" for number in range(16)]
    lines = ["\t" + "\t".join(f"\x1b[4m{name}\x1b[0m" for name in [*names, "NIC0", "CPU Affinity"])]
    for row, name in enumerate(names):
        kinds = ["X" if row == column else f"NV{min(row, column)}-{max(row, column)}" for column in range(16)]
        lines.append("\t".join([name, *kinds, "PIX", "0-63"]))
    lines.append("\t".join(["NIC0", *["PIX"] * 16, "X", ""]))
    found = gpu_inventory.links("\n".join([*lines, "", "Legend:", "  X    = Self"]))
    assert found == {(one, other): f"NV{one}-{other}" for one in range(16) for other in range(one + 1, 16)}
    assert gpu_inventory.links("No devices were found") == {}


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86  Release Build", "570.86"),
        ("NVRM version: none", "unknown"),
    ],
)
def test_the_drivers_version(text: str, version: str) -> None:
    assert gpu_inventory.driver_version(text) == version


def seen(driver: str, cuda: str | None, *gpus: Gpu) -> Survey:
    return Survey(driver, "2.15.0", cuda, nccl="2.30.7", gpus=gpus)


@pytest.mark.parametrize(
    ("driver", "cuda", "why", "fix"),
    [
        ("535.183.01", "13.2", "CUDA 13.2 needs driver 580", '"torch==2.14.*" --index-url https://download.pytorch'),
        ("570.86.15", "13.0", "CUDA 13.0 needs driver 580", "whl/cu126 (up to Hopper; for Blackwell install driver"),
        ("470.57.02", "12.6", "CUDA 12.6 needs driver 525", "install driver 580"),
        ("470.57.02", "13.2", "CUDA 13.2 needs driver 580", "install driver 580"),
        ("580.65.06", "13.2", "CUDA_VISIBLE_DEVICES is '3'", "unset CUDA_VISIBLE_DEVICES"),
        ("550.54.15", "12.6", "CUDA_VISIBLE_DEVICES is '3'", "unset CUDA_VISIBLE_DEVICES"),
        ("unknown", "13.2", "CUDA_VISIBLE_DEVICES is '3'", "unset CUDA_VISIBLE_DEVICES"),
        ("535.183.01", None, "CPU processes", "whl/cu126"),
        ("590.44.01", None, "CPU processes", "pip install --force-reinstall torch"),
    ],
)
def test_why_torch_can_use_no_gpu(driver: str, cuda: str | None, why: str, fix: str) -> None:
    found = obstacle(seen(driver, cuda), "3")
    assert found is not None
    assert (why in found.why, fix in found.fix) == (True, True), found
    assert driver in found.what
    assert (f"CUDA {cuda}" if cuda else "without CUDA") in found.what
    assert ("install driver" in found.fix) == ("needs driver" in found.why or "Blackwell" in found.fix)
    assert obstacle(seen(driver, cuda, Gpu(0, "NVIDIA H100", (9, 0), 80, 80)), "3") is None


PRETRAIN = (
    "from megatron_ext.resilience.process_end import RunStatus, run_guarded\nfrom pretrain_gpt import main",
    "status = RunStatus(rank=0); sys.exit(run_guarded(lambda: main(sys.argv[2:], status), status))",
)
DOCTOR = ("from megatron_ext.plugins.doctor.commands.doctor import main", "sys.exit(main(sys.argv[2:]))")


@pytest.mark.first("cuda")
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_ends_the_run(device: str, tmp_path: Path) -> None:
    """A driver so old that no torch of the supported versions runs with it."""
    flags = tiny(f"--train-iters 1 --device {device}")
    ended = run_with_driver(write_driver(tmp_path, "470.57.02"), *PRETRAIN, flags)
    assert ended.returncode == 64, ended.stderr
    for said in (f"--device {device}: torch {torch.__version__}", "driver 470.57.02", "use --device cpu"):
        assert said in ended.stderr
    assert torch.version.cuda is None or f"CUDA {torch.version.cuda}" in ended.stderr


@pytest.mark.full
def test_cpu_processes_that_are_asked_for_train_next_to_such_a_gpu(tmp_path: Path) -> None:
    ended = run_with_driver(write_driver(tmp_path, "470.57.02"), *PRETRAIN, tiny("--train-iters 1"))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.full
def test_the_doctor_says_so_too(tmp_path: Path) -> None:
    ended = run_with_driver(write_driver(tmp_path, "470.57.02"), *DOCTOR, ["--nproc-per-node", "1"])
    assert ended.returncode == 64, ended.stderr
    [line] = [line for line in ended.stdout.splitlines() if line.startswith("error")]
    assert "driver 470.57.02" in line
    assert "install driver 580" in ended.stdout
