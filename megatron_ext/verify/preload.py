"""This module is imported once by the forkserver, so that every rank starts with torch and megatron-core loaded."""

from megatron_ext import device

device.install("cpu")

import megatron.core.distributed  # noqa: E402
import megatron.core.models.gpt  # noqa: E402
import megatron.core.optimizer  # noqa: E402
import megatron.core.pipeline_parallel  # noqa: E402, F401
