"""Throughput against figures worked out by hand, and the names that devices give themselves."""

import pytest

from megatron_ext.telemetry.throughput import model_flops_utilization, peak_tflops, tflops_per_gpu


def test_tflops_per_gpu():
    # 7e9 parameters at 6 FLOPs each, 10,000 tokens per second on 8 GPUs: 4.2e14 / 8 = 52.5 TFLOP/s.
    assert tflops_per_gpu(6 * 7e9, 10_000.0, world_size=8) == 52.5


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L40", 181.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA H200 NVL", 835.0),
        ("NVIDIA A40", 150.0),
        ("NVIDIA A40-48Q", 150.0),
        ("NVIDIA GeForce RTX 3090", 71.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("cpu", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_peaks_of_the_names_that_devices_give_themselves(name: str, peak: float | None):
    assert peak_tflops(name) == peak


def test_utilization():
    assert model_flops_utilization(156.0, "NVIDIA A100-SXM4-80GB") == 0.5
    assert model_flops_utilization(156.0, "cpu") is None
