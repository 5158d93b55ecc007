"""GPUs over NCCL. megatron-core is used as it is."""

import os

import torch

from megatron_ext.device.protocol import Memory


class CudaDevice:
    kind = "cuda"
    backend = "nccl"

    def __init__(self, local_rank: int) -> None:
        # One hardware queue keeps communication kernels behind the computation that was launched before them, which
        # megatron-core's overlap of tensor-parallel reductions relies on. Read when CUDA starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        torch.cuda.set_device(local_rank)
        self.torch_device = torch.device("cuda", local_rank)
        self.model_name = torch.cuda.get_device_name(local_rank)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def memory(self) -> Memory:
        return Memory(
            allocated=torch.cuda.memory_allocated(),
            max_allocated=torch.cuda.max_memory_allocated(),
            reserved=torch.cuda.memory_reserved(),
        )

    def rng_state(self) -> torch.Tensor:
        return torch.cuda.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        torch.cuda.set_rng_state(state)
