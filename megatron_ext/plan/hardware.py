"""The table says what devices can do, from their makers' data sheets; every number can be given by a flag of
tools/plan.py instead.

Peaks are those of dense matrices: data sheets print twice as much for 16-bit types "with sparsity". Link bandwidths are
of one direction and one device: half of what data sheets add up over both.
"""

import dataclasses
from dataclasses import dataclass

from megatron_ext.config.schema import TrainingConfig


@dataclass(frozen=True)
class Hardware:
    """One device, and its links."""

    name: str
    peak_16bit_tflops: float
    peak_tf32_tflops: float
    peak_fp32_tflops: float
    memory_gb: float
    memory_bandwidth_gb_s: float
    intra_node_gb_s: float
    """Bandwidth from one device to the others of its node, one direction, GB/s."""

    inter_node_gb_s: float
    """Bandwidth from one device to other nodes, one direction, GB/s."""

    source: str

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.name != "cpu"

    def peak_flops(self, training: TrainingConfig) -> float:
        """Return the operations a second of matrix products in the precision of the run."""
        if training.mixed_precision:
            return self.peak_16bit_tflops * 1e12
        return (self.peak_tf32_tflops if training.tf32 else self.peak_fp32_tflops) * 1e12


@dataclass(frozen=True)
class Machine:
    """The devices of a run, and how far from their peak they are taken to be."""

    devices: Hardware
    gpus_per_node: int
    efficiency: float
    """Share of the peak that matrix products reach."""

    link_efficiency: float
    """Share of the links' bandwidth that collectives reach."""


TABLE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            "h200",
            989.5,
            494.5,
            67.0,
            141.0,
            4800.0,
            450.0,
            50.0,
            "NVIDIA H200 SXM data sheet (1,979 TFLOP/s with sparsity, NVLink 900 GB/s both ways); DGX: 400 Gb/s a GPU",
        ),
        Hardware(
            "h100",
            989.5,
            494.5,
            67.0,
            80.0,
            3350.0,
            450.0,
            50.0,
            "NVIDIA H100 SXM data sheet (1,979 TFLOP/s with sparsity, NVLink 900 GB/s both ways); DGX: 400 Gb/s a GPU",
        ),
        Hardware(
            "a100",
            312.0,
            156.0,
            19.5,
            80.0,
            2039.0,
            300.0,
            25.0,
            "NVIDIA A100 80GB SXM data sheet (NVLink 600 GB/s both ways); DGX: 200 Gb/s a GPU",
        ),
        Hardware(
            "cpu",
            0.1,
            0.1,
            0.1,
            8.0,
            10.0,
            2.0,
            1.0,
            "no data sheet: round figures for one process of a laptop",
        ),
    )
}


def hardware(name: str, **given: float | None) -> Hardware:
    """Return a row of the table, with the values that were given in place of its own."""
    return dataclasses.replace(TABLE[name], **{key: value for key, value in given.items() if value is not None})
