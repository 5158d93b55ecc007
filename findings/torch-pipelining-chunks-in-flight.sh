#!/usr/bin/env bash
# torch 2.15.0: InterleavedZeroBubble keeps fewer chunks in flight than Interleaved1F1B; DualPipeV's last rank one more.
#
# Question: 4 ranks with 2 chunks of the model each, 8 microbatches. How many chunks of microbatches at most have gone
# forward on ranks 0 to 3 while the gradient of their input has not been computed?
# Expected: Interleaved1F1B 11, 9, 7, 5; InterleavedZeroBubble as many, for it divides backwards and keeps the order.
# Guessed before measuring: ZBVZeroBubble 8 everywhere, DualPipeV 9 everywhere. Measured: InterleavedZeroBubble 8, 7, 6, 5 (and 8
# everywhere where one counts until the weights' gradient), DualPipeV 8, 8, 8, 9. With 4 chunks a rank 19, 17, 15, 13
# become 16, 15, 14, 13. Sixteen microbatches change none of these, so a rank's memory must be planned by the schedule.
# Two readers, asked blindly: both had 9 on every rank of DualPipeV, and the others right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/count.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage, schedules

RANKS = 4
EXPECTED = {
    ("Interleaved1F1B", 2): ([11, 9, 7, 5], [11, 9, 7, 5]),
    ("InterleavedZeroBubble", 2): ([8, 7, 6, 5], [8, 8, 8, 8]),
    ("ZBVZeroBubble", 2): ([8, 8, 8, 8], [8, 8, 8, 8]),
    ("DualPipeV", 2): ([8, 8, 8, 9], [8, 8, 8, 9]),
    ("Interleaved1F1B", 4): ([19, 17, 15, 13], [19, 17, 15, 13]),
    ("InterleavedZeroBubble", 4): ([16, 15, 14, 13], [16, 16, 16, 16]),
}


def most(actions, ends):
    live, seen = set(), 0
    for action in actions:
        for part in [] if action is None else action.sub_actions or [action]:
            chunk = part.stage_index, part.microbatch_index
            if part.computation_type.name == "FORWARD":
                live.add(chunk)
            elif part.computation_type.name in ends:
                live.discard(chunk)
        seen = max(seen, len(live))
    return seen


def work(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=RANKS)
    wrong = 0
    for microbatches in (8, 16):
        for (name, chunks), expected in EXPECTED.items():
            in_a_v = name in ("ZBVZeroBubble", "DualPipeV")
            places = [rank, 2 * RANKS - 1 - rank] if in_a_v else [rank + RANKS * chunk for chunk in range(chunks)]
            device, count = torch.device("cpu"), RANKS * chunks
            stages = [PipelineStage(torch.nn.Linear(4, 4), place, count, device) for place in places]
            loss = torch.nn.functional.mse_loss
            order = getattr(schedules, f"Schedule{name}")(stages, microbatches, loss_fn=loss).pipeline_order
            of_inputs = [most(order[each], ("FULL_BACKWARD", "BACKWARD_INPUT")) for each in range(RANKS)]
            of_weights = [most(order[each], ("FULL_BACKWARD", "BACKWARD_WEIGHT")) for each in range(RANKS)]
            wrong += (of_inputs, of_weights) != expected
            if rank == 0:
                print(torch.__version__, name, chunks, microbatches, of_inputs, of_weights, flush=True)
    dist.destroy_process_group()
    sys.exit(wrong)


if __name__ == "__main__":
    mp.spawn(work, (sys.argv[1],), RANKS)
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.5.5
"$folder/venv/bin/python" "$folder/count.py" "$folder/store" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29, the same for 16 microbatches:
#   2.15.0+cu132 Interleaved1F1B 2 8 [11, 9, 7, 5] [11, 9, 7, 5]
#   2.15.0+cu132 InterleavedZeroBubble 2 8 [8, 7, 6, 5] [8, 8, 8, 8]
#   2.15.0+cu132 ZBVZeroBubble 2 8 [8, 8, 8, 8] [8, 8, 8, 8]
#   2.15.0+cu132 DualPipeV 2 8 [8, 8, 8, 9] [8, 8, 8, 9]
#   2.15.0+cu132 Interleaved1F1B 4 8 [19, 17, 15, 13] [19, 17, 15, 13]
#   2.15.0+cu132 InterleavedZeroBubble 4 8 [16, 15, 14, 13] [16, 16, 16, 16]
