"""Every test process computes on the CPU, prepared as the program itself would be."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ext import device

device.install("cpu")
