"""Runs one fact case of benchmarks/gpu_session.py: `gpu_facts.py DEVICE NAME [BACKEND]`.

It needs torch alone and prints RESULT and JSON. BACKEND, of a group of one rank, is a value of --nccl-backend, or gloo.
"""

import importlib.metadata
import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.cuda import nccl

from megatron_ext.device import nccl_choice

PACKAGES = (
    *("torch", "triton", "megatron-core", "numpy", "PyYAML", "sentencepiece", "tokenizers", "transformers", "tiktoken"),
    *("tensorboard", "psutil", "einops", "gigatoken", "orjson", "nvidia-cudnn-cu13", "nvidia-nccl-cu13"),
    *("transformer-engine", "flash-attn"),
)
SHAPES = {"D64 s1k": (8, 12, 1024, 64), "D128 s2k": (4, 16, 2048, 128)}
"""Shape [B, H, S, D]."""


def main(device: str, name: str, *backend: str) -> None:
    facts = {"versions": versions, "attention": attention, "group of one": group_of_one}[name](device, *backend)
    print("RESULT", json.dumps(facts), flush=True)


def versions(device: str) -> dict[str, Any]:
    gpu = None
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        gpu = [properties.name, list(torch.cuda.get_device_capability(0)), properties.total_memory]
    return {
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "gpu": gpu,
        "compilers": {name: _first_line(name, "--version") for name in ("gcc", "g++", "clang", "nvcc", "ptxas")},
        "driver": _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def attention(device: str) -> dict[str, Any]:
    """Report which of torch's kernels take which heads, forward and backward, and the signatures that our code relies
    on."""
    from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
    from torch.nn.functional import scaled_dot_product_attention as attend

    taken: dict[str, Any] = {}
    shapes = SHAPES if device == "cuda" else {"D64 s64": (1, 2, 64, 64)}
    for shape_name, shape in shapes.items():
        for backend in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
            heads = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
            try:
                with sdpa_kernel(getattr(SDPBackend, backend)):
                    attend(heads, heads, heads, is_causal=True).sum().backward()
                taken[f"{shape_name} {backend}"] = "yes"
            except RuntimeError as error:
                taken[f"{shape_name} {backend}"] = str(error).splitlines()[0]
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    return {
        "sdpa": taken,
        "varlen_attn": str(inspect.signature(varlen.varlen_attn)),
        "flash backward": str(backward._schema),
    }


def group_of_one(device: str, implementation: str) -> dict[str, Any]:
    """Start and end torch.distributed as the program does for one rank, and report which implementation answered."""
    import torch.distributed as dist

    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":  # torch reads the variable at the first group; without it the one that we do not take answers
        nccl_choice.choose(implementation)
    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    total = torch.ones(1 << 20, device=device)
    dist.all_reduce(total)
    dist.barrier()
    answer = total.sum().item()
    dist.destroy_process_group()
    if answer != 1 << 20:
        raise SystemExit(f"the all-reduce gave {answer}")
    if device != "cuda":
        return {"backend": backend, "nccl": None}
    return {"backend": nccl_choice.in_use(), "nccl": ".".join(map(str, nccl.version()))}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    return next(iter(said.splitlines()), None)


if __name__ == "__main__":
    main(*sys.argv[1:])
