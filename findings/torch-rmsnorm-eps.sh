#!/usr/bin/env bash
# torch 2.15.0: RMSNorm without eps takes the epsilon of fp32 for bf16 and fp16, not of the input's type as documented.
#
# Question: RMSNorm(64) without eps gets 64 values of 1e-3. What does it return in bf16, fp16, fp32 and fp64?
# Expected, from the documentation (eps=None is torch.finfo(x.dtype).eps: 0.0078, 0.00098, 1.2e-7,
# 2.2e-16): 0.0113, 0.032, 0.945, 1.0. Measured: 0.945 three times, then 1.0. An engine that computes the documented
# formula for small activations in bf16 is off by a factor of 84.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/norm.py" <<'PYTHON'
import sys

import torch

returned, documented = [], []
for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
    values = torch.full((64,), 1e-3, dtype=dtype)
    returned.append(round(torch.nn.RMSNorm(64, dtype=dtype)(values)[0].item(), 3))
    wide = values.double()
    documented.append(round((wide / (wide.square().mean() + torch.finfo(dtype).eps).sqrt())[0].item(), 3))
print(torch.__version__, "returned", *returned, "documented", *documented)
sys.exit(returned != [0.945, 0.945, 0.945, 1.0] or documented != [0.011, 0.032, 0.945, 1.0])
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.5.5
"$folder/venv/bin/python" "$folder/norm.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29:
#   2.15.0+cu132 returned 0.945 0.945 0.945 1.0 documented 0.011 0.032 0.945 1.0
