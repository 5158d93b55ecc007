"""Settles which library multiplies fp32 matrices on a CPU, once, before the model is built, the same on all ranks.

The libraries round differently. A resumed run therefore keeps that of its checkpoint, so that it goes on with the same
bits: the choice is part of the configuration that a checkpoint holds.
"""

from dataclasses import replace

import torch

from megatron_ext.checkpoint.native.resume import Resume
from megatron_ext.config.schema import Config
from megatron_ext.device.device_protocol import Device
from megatron_ext.device.kernels import GEMMS, gemm_by_ability, measured_gemm, use_gemm


def choose(config: Config, device: Device, resume: Resume | None) -> Config:
    """Return the configuration with --cpu-gemm auto replaced by what is used. Collective, where it is measured."""
    training = config.training
    if device.kind != "cpu" or training.cpu_gemm != "auto" or training.params_dtype != "float32":
        return config
    saved = ((resume.saved if resume is not None else None) or {}).get("cpu_gemm")
    chosen = [saved if saved in GEMMS else measured_gemm()]
    torch.distributed.broadcast_object_list(chosen, src=0)
    return replace(config, training=replace(training, cpu_gemm=chosen[0]))


def use(config: Config) -> None:
    """Have this process multiply as the configuration says; with auto by the processor's vectors alone."""
    name = config.training.cpu_gemm
    use_gemm(gemm_by_ability() if name == "auto" else name)
