#!/usr/bin/env bash
# torch 2.15.0: on a CPU grouped_mm leaves rows past the last offset as the memory was, forward and in the gradient.
#
# Question: 8 rows of ones (8 x 16) go through F.grouped_mm with two weights of ones (2 x 16 x 16) and offsets [3, 5],
# as where a buffer of an expert layer has room for more tokens than came. What stands in column 0 of the result, and of
# the gradient of the sum of the first five rows?
# Guessed before measuring: 16, 16, 16, 16, 16, 0, 0, 0 in both. Measured: the last three rows are written by nobody, in
# either; with deterministic algorithms, where torch fills new memory with NaN, they are NaN. A sum over all rows, a
# norm of the gradient, or a product with a weight of 0 therefore is NaN or any number.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/rows.py" <<'PYTHON'
import sys

import torch

torch.use_deterministic_algorithms(True)
wrong = 0
for dtype in (torch.bfloat16, torch.float16, torch.float32):
    tokens = torch.ones(8, 16, dtype=dtype, requires_grad=True)
    weights = torch.ones(2, 16, 16, dtype=dtype, requires_grad=True)
    result = torch.nn.functional.grouped_mm(tokens, weights, offs=torch.tensor([3, 5], dtype=torch.int32))
    result[:5].float().sum().backward()
    found = [str(column[:, 0].tolist()) for column in (result, tokens.grad)]
    weights_are_right = weights.grad[:, 0, 0].tolist() == [3.0, 2.0]
    print(torch.__version__, dtype, *found, weights_are_right)
    wrong += found != ["[16.0, 16.0, 16.0, 16.0, 16.0, nan, nan, nan]"] * 2 or not weights_are_right
sys.exit(wrong)
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.5.5
"$folder/venv/bin/python" "$folder/rows.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29, the same for float16 and float32:
#   2.15.0+cu132 torch.bfloat16 [16.0, 16.0, 16.0, 16.0, 16.0, nan, nan, nan] (twice) True
