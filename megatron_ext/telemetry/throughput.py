"""Computes how fast the model trains: model TFLOP/s per GPU, and the share of the GPU's peak
(MFU)."""

import re

# Peak TFLOP/s of dense 16-bit matrix products (bfloat16; float16 on V100, which has no bfloat16), without sparsity,
# accumulated in fp32. From NVIDIA's data sheets, which give the double for sparse products on Ampere and later; the
# GeForce figures from the Ada and Ampere GA102 architecture papers. First match wins, so variants come first.
_PEAKS = (
    (r"\bGB200\b", 2500.0),
    (r"\bB200\b", 2250.0),
    (r"\bH200 NVL\b", 835.0),
    (r"\bG?H200\b", 989.0),
    (r"\bH100 NVL\b", 835.0),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH100\b", 989.0),
    (r"\bA100\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL40\b", 181.0),
    (r"\bL4\b", 121.0),
    (r"\bA40\b", 150.0),
    (r"\bA10\b", 125.0),
    (r"\bRTX 4090\b", 165.0),
    (r"\bRTX 3090\b", 71.0),
    (r"\bV100\b", 125.0),
)


def tflops_per_gpu(flops_per_token: float, tokens_per_second: float, world_size: int) -> float:
    """Return model TFLOP/s per rank; recomputation is not counted.

    Args:
        flops_per_token: floating-point operations of forward and backward, over the whole model.
        tokens_per_second: tokens per second of the whole job.
        world_size: number of ranks of the job.
    """
    return flops_per_token * tokens_per_second / world_size / 1e12


def peak_tflops(device_name: str) -> float | None:
    """Return peak dense 16-bit TFLOP/s of a device, by the name that torch.cuda.get_device_name gives; None if
    unknown."""
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, device_name)), None)


def model_flops_utilization(tflops: float, device_name: str) -> float | None:
    """Return the share of the peak that the model's FLOPs reach, 0 to 1 (Chowdhery et al., PaLM, appendix B); None if
    unknown."""
    peak = peak_tflops(device_name)
    return None if peak is None else tflops / peak
