"""Finds the GPUs that this machine shows, before any is used: driver, CUDA, NCCL, connections. This needs no
`install`."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from megatron_ext.device import hardware_queues

_OLDEST_DRIVERS = {13: 580, 12: 525}
"""The oldest driver that runs programs of any CUDA of a major version (NVIDIA, CUDA Compatibility, "Minor Version
Compatibility", table 1)."""

_WHEEL_OF_CUDA_12 = 'pip install "torch==2.14.*" --index-url https://download.pytorch.org/whl/cu126'
"""Installs the newest torch with CUDA 12: 2.14 is the last version with such wheels (PyTorch's developer mailing list,
"CUDA 12.6 wheels will no longer be published from PyTorch 2.15")."""


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees; memory in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    free: int
    total: int


@dataclass(frozen=True)
class Survey:
    """The GPUs of a machine that has a driver.

    Attributes:
        driver: the driver's version.
        torch: torch's version.
        cuda: the CUDA that torch is built with; None for a build without.
        nccl: the NCCL that torch is built with; None for a build without.
        links: pairs of GPUs and how they are connected: NV18 and the like (NVLink), PIX, PXB, PHB, NODE, SYS.
    """

    driver: str
    torch: str
    cuda: str | None
    nccl: str | None
    gpus: tuple[Gpu, ...] = ()
    links: Mapping[tuple[int, int], str] = field(default_factory=dict)


class Obstacle(NamedTuple):
    """Why torch can use no GPU of a machine that has a driver: the facts found, the reason, and advice."""

    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}; {self.fix}"


def survey() -> Survey | None:
    """Return the GPUs of this machine; None where there is no NVIDIA driver, and then torch is not imported."""
    if not hardware_queues.shows_gpu():
        return None
    import torch
    from torch.cuda import nccl

    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(index)
        name, capability = torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)
        gpus.append(Gpu(index, name, capability, free, total))
    has_nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return Survey(
        driver=driver_version(hardware_queues.driver_text()),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, nccl.version())) if has_nccl else None,
        gpus=tuple(gpus),
        links=links(_topology()) if gpus else {},
    )


def obstacle(surveyed: Survey, visible: str | None) -> Obstacle | None:
    """Return why torch can use no GPU here; None where it can.

    Args:
        surveyed: the machine's GPUs.
        visible: the value of CUDA_VISIBLE_DEVICES; None where it is not set.
    """
    if surveyed.gpus:
        return None
    major = int(surveyed.driver.partition(".")[0]) if surveyed.driver != "unknown" else None
    here = f"NVIDIA driver {surveyed.driver}"
    if surveyed.cuda is None:
        what = f"torch {surveyed.torch} is built without CUDA, but this machine has {here}"
        return Obstacle(what, "the run would take CPU processes", _wheel(major))
    what = f"torch {surveyed.torch} (CUDA {surveyed.cuda}) sees no GPU, but this machine has {here}"
    oldest = _OLDEST_DRIVERS.get(int(surveyed.cuda.partition(".")[0]))
    if major is not None and oldest is not None and major < oldest:
        return Obstacle(what, f"CUDA {surveyed.cuda} needs driver {oldest} or newer", _wheel(major))
    why = f"CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}; a container or job may hide GPUs"
    fix = "docker run --gpus all, srun --gpus-per-node N, or unset CUDA_VISIBLE_DEVICES; `nvidia-smi` lists the GPUs"
    return Obstacle(what, why, fix)


def _wheel(driver: int | None) -> str:
    """Return how to install a torch that runs with a driver of this major version; None where it is unknown."""
    if driver is None or driver >= _OLDEST_DRIVERS[13]:
        return "pip install --force-reinstall torch, without an --index-url that ends in /cpu"
    newer = f"install driver {_OLDEST_DRIVERS[13]} or newer"
    if driver < _OLDEST_DRIVERS[12]:
        return newer
    return f"{_WHEEL_OF_CUDA_12} (up to Hopper; for Blackwell {newer})"


def driver_version(text: str) -> str:
    """Return the driver's version from /proc/driver/nvidia/version."""
    match = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match.group(1) if match else "unknown"


def links(matrix: str) -> dict[tuple[int, int], str]:
    """Return pairs of GPUs and their connection, from the text of `nvidia-smi topo -m`."""
    rows = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in matrix.splitlines()]
    header = next((row for row in rows if row and row[0] == "GPU0" and "X" not in row), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    kinds = {}
    for row in rows:
        if row and re.fullmatch(r"GPU\d+", row[0]) and "X" in row:
            own = int(row[0][3:])
            for name, kind in zip(columns, row[1:], strict=False):
                if own < int(name[3:]):
                    kinds[own, int(name[3:])] = kind
    return kinds


def _topology() -> str:
    try:
        command = ("nvidia-smi", "topo", "-m")
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
