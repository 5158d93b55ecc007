#!/usr/bin/env bash
# torch 2.15.0 against ml_dtypes 0.6.0: a cast to float8_e8m0fnu drops the sign and makes 2^-127 of zero, or gives NaN.
#
# Question: the scales 0, 0.75, 1.4, 1.5, 2.9, 3, 6, -1, infinity and 1.5 * 2^127 are cast to float8_e8m0fnu by torch
# and by ml_dtypes (jax, numpy). What comes out?
# Guessed before measuring: the same by both: 2^-127, 0.5, 1, 2, 2, 2, 8, NaN, NaN, NaN (ties go to the even exponent).
# Measured: torch makes 2^-127 of 0 and 1 of -1, where ml_dtypes gives NaN; a mantissa of exactly a half goes up in both
# (0.75 is 1, 3 is 4). A block of zeros, or a scale of the wrong sign, is a NaN in jax and passes unseen in torch.
# Two readers, asked blindly: both had torch right, and of ml_dtypes 2^-127 for 0, 0.5 for 0.75, 2 for 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/cast.py" <<'PYTHON'
import sys
from importlib.metadata import version

import ml_dtypes
import numpy as np
import torch

scales = np.array([0, 0.75, 1.4, 1.5, 2.9, 3, 6, -1, np.inf, 1.5 * 2.0**127], dtype=np.float32)
by_torch = torch.from_numpy(scales).to(torch.float8_e8m0fnu).float().numpy()
by_ml_dtypes = scales.astype(ml_dtypes.float8_e8m0fnu).astype(np.float32)
print("torch", torch.__version__, *by_torch)
print("ml_dtypes", version("ml_dtypes"), *by_ml_dtypes)
common = np.array([1, 1, 2, 2, 4, 8], dtype=np.float32)
of_torch = np.array([2.0**-127, *common, 1, np.nan, np.nan], dtype=np.float32)
of_ml_dtypes = np.array([np.nan, *common, np.nan, np.nan, np.nan], dtype=np.float32)
same = [np.array_equal(one, two, equal_nan=True) for one, two in ((by_torch, of_torch), (by_ml_dtypes, of_ml_dtypes))]
sys.exit(not all(same))
PYTHON
python3.12 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.15.0 numpy==2.5.5 ml_dtypes==0.6.0
"$folder/venv/bin/python" "$folder/cast.py" 2> "$folder/errors" || { cat "$folder/errors"; exit 1; }
# Output seen on 2026-11-29:
#   torch 2.15.0+cu132 5.877472e-39 1.0 1.0 2.0 2.0 4.0 8.0 1.0 nan nan
#   ml_dtypes 0.6.0 nan 1.0 1.0 2.0 2.0 4.0 8.0 nan nan nan
