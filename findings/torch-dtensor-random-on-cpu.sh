#!/usr/bin/env bash
# torch 2.15.0: on a mesh of CPU ranks with one seed, DTensors are filled with the same rows on every rank.
#
# Question: four CPU ranks call torch.manual_seed(0). Of eight rows, divided by Shard(0), how many are distinct after
# distributed.tensor.rand, after nn.init.normal_ on a DTensor, and after dropout of ones?
# Guessed before measuring: two after `rand`; expected: two and eight after the others (dropout of a DTensor has offsets
# of its own). Measured: `rand` and
# `randn` raise an AssertionError without a text, the other two repeat the first rank's two rows four times; no warning
# is given by nn.init. A CPU rehearsal of a sharded model therefore starts from weights of a quarter of their rank.
# Two readers, asked blindly: two rows after each of the three, by both: `rand` does not run.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/rows.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, rand


def distinct(tensor):
    return len({tuple(row) for row in tensor.full_tensor().tolist()})


def work(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=4)
    mesh = dist.init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    try:
        found = [distinct(rand(8, 32, device_mesh=mesh, placements=[Shard(0)]))]
    except AssertionError as error:
        found = [f"AssertionError({error})"]
    weight = distribute_tensor(torch.empty(8, 32), mesh, [Shard(0)])
    torch.manual_seed(0)
    found.append(distinct(torch.nn.init.normal_(weight)))
    torch.manual_seed(0)
    ones = distribute_tensor(torch.ones(8, 32), mesh, [Shard(0)])
    found.append(distinct(torch.nn.functional.dropout(ones)))
    if rank == 0:
        print(torch.__version__, *found, flush=True)
    dist.destroy_process_group()
    sys.exit(found != ["AssertionError()", 2, 2])


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), 4)
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.5.5
"$folder/venv/bin/python" "$folder/rows.py" "$folder/store" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29:
#   2.15.0+cu132 AssertionError() 2 2
