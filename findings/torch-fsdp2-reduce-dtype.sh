#!/usr/bin/env bash
# torch 2.15.0: FSDP2 with a param_dtype of bf16 and no reduce_dtype adds gradients in fp32; 2.14 did so in bf16.
#
# Question: a weight of 8 ones is divided by fully_shard over 4 gloo ranks with
# MixedPrecisionPolicy(param_dtype=bfloat16). Its gradient is 1024 on rank 0 and 4 on the others. What is the averaged
# gradient? And of gradients of 1 in 300 backward passes without synchronization but in the last? And both with
# reduce_dtype=bfloat16 as well?
# Until 2.14 the reduction took param_dtype, so that both were alike; 2.15's documentation says that it is otherwise now.
# No guess was written down before measuring. Measured: 259 and 300, which bf16 cannot hold, without reduce_dtype (and
# with float32); with bfloat16 260, 260, 256, 256, 256, 256, 260, 260, and 256.
# Two readers, asked blindly: 260, 260, 256, 256, 256, 256, 260, 260, and 256, with reduce_dtype and without, by both.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/reduce.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANKS = 4
EXPECTED = {
    None: ([259] * 8, 300),
    torch.float32: ([259] * 8, 300),
    torch.bfloat16: ([260] * 2 + [256] * 4 + [260] * 2, 256),
}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        assert self.weight.dtype == torch.bfloat16
        return self.weight * x


def work(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    wrong = 0
    for dtype, expected in EXPECTED.items():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=dtype)
        one, many = (fully_shard(Model(), mesh=mesh, mp_policy=policy) for _ in range(2))
        one(torch.full((1,), 1024.0 if rank == 0 else 4.0)).sum().backward()
        for step in range(300):
            many.set_requires_gradient_sync(step == 299)
            many(torch.ones(1)).sum().backward()
        found = one.weight.grad.full_tensor().tolist(), many.weight.grad.full_tensor()[0].item()
        wrong += found != expected
        if rank == 0:
            print(torch.__version__, f"{dtype}:", *found, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.exit(wrong)


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), RANKS)
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.5.5
"$folder/venv/bin/python" "$folder/reduce.py" "$folder/store" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29:
#   2.15.0+cu132 None: [259.0, 259.0, 259.0, 259.0, 259.0, 259.0, 259.0, 259.0] 300.0
#   2.15.0+cu132 torch.float32: [259.0, 259.0, 259.0, 259.0, 259.0, 259.0, 259.0, 259.0] 300.0
#   2.15.0+cu132 torch.bfloat16: [260.0, 260.0, 256.0, 256.0, 256.0, 256.0, 260.0, 260.0] 256.0
