"""The forkserver imports this once, so that every rank starts with torch, megatron-core and the program loaded."""

import gc
import importlib
import sys

_collected_by_itself = gc.isenabled()
gc.disable()  # it would look through half a million objects that stay, again and again

from megatron_ext import device  # noqa: E402
from megatron_ext.gc_freeze import end_at_once  # noqa: E402

if any("multiprocessing.forkserver" in word for word in sys.orig_argv):  # and not whoever else imports all modules
    end_at_once()
device.install("cpu")

import megatron.core.datasets.blended_megatron_dataset_builder  # noqa: E402
import megatron.core.datasets.gpt_dataset  # noqa: E402
import megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader  # noqa: E402
import megatron.core.dist_checkpointing.strategies.state_dict_saver  # noqa: E402
import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt  # noqa: E402
import megatron.core.models.mimo.optimizer  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402, F401

# The program itself, with what it imports once it knows its flags: each rank would take a quarter of a second for it.
import torch  # noqa: E402

from megatron_ext.config.derived.sharding import SCHEMES  # noqa: E402
from megatron_ext.config.parse.options import options_by_flag  # noqa: E402
from megatron_ext.device.kernels import measured_gemm  # noqa: E402
from megatron_ext.registry import EXTENSION_POINTS, brought  # noqa: E402

# Otherwise each rank would measure, look up and list the same for a tenth of a second.
measured_gemm()
torch.distributed.BackendConfig("gloo")
options_by_flag()
for point in EXTENSION_POINTS:
    brought(point)
for module in brought("preloaded"):
    importlib.import_module(module)
for scheme in SCHEMES:
    importlib.import_module(scheme.implementation.partition(":")[0])

# Loaded objects stay: the collector of a rank need not look at it, which would also copy its pages.
gc.freeze()
if _collected_by_itself:
    gc.enable()
