"""Finds what GPUs this machine shows, before any is used: driver, CUDA, NCCL, connections. This needs no `install`."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia/version")


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


def survey() -> Survey | None:
    """Return the GPUs of this machine; None where there is no NVIDIA driver, and then torch is not imported."""
    if not _DRIVER.exists():
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
        driver=driver_version(_DRIVER.read_text()),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        nccl=".".join(map(str, nccl.version())) if has_nccl else None,
        gpus=tuple(gpus),
        links=links(_topology()),
    )


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
