"""Holds the table of devices, with peak rates, bandwidths and memory from their makers' data sheets, and the constants
of the time model, each with its source or its fit.

A flag of `megatron-ext plan` can replace any number of the table. Peaks are for dense matrices: data sheets print twice
as much for types of 16 and 8 bits "with sparsity". Peaks of 8 and 4 bits are of the same sheets: NVIDIA's of H100,
H200, HGX B200 and B300, GB200 and GB300 NVL72 (B300's dense rate of 4 bits is 3/4 of the sparse one), AMD's of MI300X
and MI355X. Link bandwidths are of one direction and one device: half of the sum over both directions that data sheets
print. Memory is the size that a driver reports to a program (torch.cuda.get_device_properties): neither the data
sheet's figure in powers of ten nor in powers of two.

Nine numbers are fitted to 162 published runs, tests/golden/published_runs.jsonl and, at half their weight,
published_runs_llm_foundry.csv (`python benchmarks/planner.py --fit` computes them again): `edge`, `activations`,
`straggling`, `fsdp_shown`, and in the table of devices the shares of the peak that large matrix products reach on A100,
H100 and H100 limited to 500 W, and attention in programs of FSDP on A100 and H100. The others are taken from
publications, or assumed where they say so.
"""

import dataclasses
from dataclasses import dataclass, field

from megatron_ext.config.schema import TrainingConfig


@dataclass(frozen=True)
class Constants:
    """Constants of the time model that no data sheet has."""

    edge: float = 236.0
    """Rows and columns by which a matrix product's cost exceeds its size: tiles at the edges and the last wave of
    tiles are not full. Fitted; tiles are 128 to 256 wide."""

    inner: float = 100.0
    """Terms of a sum by which a product's cost exceeds its length: the loop over K starts and ends. Assumed: some tens
    of instructions of 16 to 64 terms."""

    attention_keys: float = 500.0
    """Keys by which the cost of fused attention exceeds a sequence's: Shah et al. 2024 (FlashAttention-3,
    arXiv:2407.08608, figure 5) reach half of their final rate at about 500 keys, causal, 128 channels."""

    activations: float = 2.54
    """Factor on the planner's count of reads and writes of activations, at the bandwidth of the data sheet: for casts,
    copies, reductions and kernels that do not reach the bandwidth. Fitted."""

    fsdp_shown: float = 0.755
    """Share of FSDP's traffic that makes a step longer, although it could run next to computation: FSDP gathers a few
    layers ahead at most, and computation waits. Fitted; a 70B model of llm-foundry takes 18% longer a token on 32 H100
    with 2 samples a microbatch than on 64 with 8."""

    stream: float = 0.85
    """Share of the memory's bandwidth that long reads and writes reach. The usual result of BabelStream on A100 and
    H100 is 0.85 to 0.92."""

    contention: float = 0.1
    """Share of hidden traffic's time that computation is slower for it: NCCL's 8 to 24 channels take as many of 108 or
    132 multiprocessors."""

    hop: float = 3e-6
    """Seconds of latency from one node to another. Assumed; nccl-tests show 3 to 6 microseconds a hop of small rings
    over InfiniBand."""

    hop_inside: float = 1.5e-6
    """Seconds of latency between two devices of a node. Assumed; nccl-tests on NVLink show 10 to 20 microseconds for
    a ring of 8."""

    intra_share: float = 0.8
    """Share of the links inside of a node that collectives reach: nccl-tests' bus bandwidth on 8 H100, about 360 of 450
    GB/s, and on 8 A100, about 235 of 300."""

    inter_share: float = 0.95
    """Share of the links between nodes that collectives reach: nccl-tests over 400 Gb/s adapters, about 48 of 50
    GB/s."""

    straggling: float = 0.0080
    """Share by which a step is longer for every doubling of the nodes: all wait for the slowest. Fitted; MPT-7B is 10%
    slower on 512 H100 than on 8 (6 doublings), Llama 3.1 405B 2.4% on 2,304 than on 576."""

    host_gb_s: float = 20.0
    """GB/s at which a host's processor reads and writes the optimizer's state of one device. Assumed: an eighth of
    a node's memory bandwidth, and no more than PCIe 4.0 x16."""

    imbalance: float = 1.1
    """Tokens of the expert-parallel rank that has most of them over the mean. Assumed, with the usual load balancing
    loss."""

    calls_of_a_layer: float = 0.0
    """Seconds of the processor's for a forward and a backward pass of one microbatch through one layer, however small
    the layer: Python, autograd and the start of each kernel. On GPUs these run ahead of the device."""

    calls_of_a_pass: float = 0.0
    """CPU seconds of the program's own calls for a microbatch's passes through one chunk, without its layers: schedule,
    batch, embedding, loss."""

    calls_of_a_step: float = 0.0
    """CPU seconds of the program's own calls for a step, once a process: batches, clipping, the optimizer's call,
    logging."""

    cores: int | None = None
    """Processor cores that the processes of a node share, on CPU ranks: None for one each."""


CPU = Constants(
    edge=16.0,
    inner=32.0,
    activations=2.0,
    contention=1.0,
    fsdp_shown=1.0,
    hop=4e-4,
    hop_inside=4e-4,
    calls_of_a_layer=4e-3,
    calls_of_a_pass=5e-3,
    calls_of_a_step=9e-3,
)
"""For CPU ranks: nothing is hidden where computation and traffic share the cores. A hop is the CPU time that gloo costs
a rank for small tensors: 0.2 to 0.6 ms, from sums, gathers, broadcasts and messages of 256 bytes between 2 and 4 ranks
(torch 2.15, two cores). The program's own calls: `benchmarks/planner_cpu.py --calls`."""

RANGE = (0.90, 1.16)
"""Time over estimate between which 90% of the published runs lie, each left out of the fit with all of its source."""

ASSUMED_RANGE = (0.70, 1.45)
"""The same for devices of which no run was fitted: the range, and the uncertainty of their share of the peak."""

CALIBRATED_RANGE = (0.94, 1.08)
"""The same where one measured run of the same program and machine corrects the estimate: the published runs, each
corrected by each other one of its source, where all sources weigh the same, without the table whose micro batches are
assumed. Of dgxc-benchmarking's alone it is 0.95 to 1.04."""

PROGRAMS_DIFFER = 0.03
"""Standard deviation of the logarithm of time over estimate from one program and machine to another: the variance
components of the published runs by source (`python benchmarks/planner.py`), 0.026, and 0.030 without the table whose
micro batches are assumed."""

RUNS_DIFFER = 0.05
"""The same deviation from one run to another of one program and machine: 0.053, and 0.037 without that table."""

ASSUMED_PROGRAMS_DIFFER = 0.22
"""PROGRAMS_DIFFER for devices of which no run was fitted: the deviation that ASSUMED_RANGE stands for."""


@dataclass(frozen=True)
class Hardware:
    """One device, and its links."""

    name: str
    peak_16bit_tflops: float
    peak_tf32_tflops: float
    peak_fp32_tflops: float
    memory_gb: float
    """Memory that a program finds, in 10^9 bytes."""

    memory_bandwidth_gb_s: float
    intra_node_gb_s: float
    """Bandwidth from one device to the others of its node, one direction, GB/s."""

    inter_node_gb_s: float
    """Bandwidth from one device to other nodes, one direction, GB/s."""

    power_watts: float
    """Power that the device may draw, without its share of the node."""

    matmul_share: float
    """Share of the peak that large matrix products reach, before the losses that depend on their sizes."""

    attention_share: float
    """Share of the peak that fused attention reaches on long sequences."""

    fsdp_attention_share: float
    """Share of the peak that fused attention reaches in FSDP programs: the published ones have kernels before
    FlashAttention-3, with ALiBi. On A100 and H100 fitted, elsewhere in proportion."""

    fitted: bool
    """Whether the shares come from published runs on this device, or are assumed."""

    source: str
    peak_8bit_tflops: float | None = None
    """Peak of products of 8-bit floating-point factors; None: it has none, and multiplies in 16 bits."""

    peak_4bit_tflops: float | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.name != "cpu"

    def peak_flops(self, training: TrainingConfig) -> float:
        """Return the operations a second of matrix products in the precision of the run."""
        if training.mixed_precision:
            return self.peak_16bit_tflops * 1e12
        return (self.peak_tf32_tflops if training.tf32 else self.peak_fp32_tflops) * 1e12

    def gain(self, bits: int) -> float:
        """Return the peak of products whose factors have this number of bits over the peak of 16-bit products; 1 where
        it has no such products, or where the number is 0, which stands for the precision of the run."""
        peak = {8: self.peak_8bit_tflops, 4: self.peak_4bit_tflops}.get(bits)
        return 1.0 if peak is None else peak / self.peak_16bit_tflops


@dataclass(frozen=True)
class Machine:
    """The devices of a run, and how far from their peak they are taken to be."""

    devices: Hardware
    gpus_per_node: int = 8
    efficiency: float | None = None
    """Share of the peak that large matrix products reach; None: the table's."""

    link_efficiency: float | None = None
    """Share of the links' bandwidth that collectives reach; None: the share in the constants of cost/hardware.py."""

    constants: Constants = field(default_factory=Constants)
    correction: float | None = None
    """Factor for every estimated time, from a measured run on this machine; None: no run was measured."""

    measured_ratio: float | None = None
    """Measured over estimated time of that run, part of which is its own (plugins/planner/calibrate.py)."""

    @property
    def matmul_share(self) -> float:
        """Share of the peak that large matrix products reach."""
        return self.devices.matmul_share if self.efficiency is None else self.efficiency

    @property
    def attention_share(self) -> float:
        """Share of the peak that fused attention reaches."""
        return self.devices.attention_share * self.matmul_share / self.devices.matmul_share

    @property
    def fsdp_attention_share(self) -> float:
        """Share of the peak that fused attention reaches in FSDP programs."""
        return self.devices.fsdp_attention_share * self.matmul_share / self.devices.matmul_share

    @property
    def intra_share(self) -> float:
        """Share of the links inside of a node that collectives reach."""
        return self.constants.intra_share if self.link_efficiency is None else self.link_efficiency

    @property
    def inter_share(self) -> float:
        """Share of the links between nodes that collectives reach."""
        return self.constants.inter_share if self.link_efficiency is None else self.link_efficiency

    @property
    def range(self) -> tuple[float, float]:
        """The time over the estimate between which nine of ten runs are expected."""
        if self.correction is not None:
            return CALIBRATED_RANGE
        return RANGE if self.devices.fitted else ASSUMED_RANGE

    def processes_share(self, world_size: int) -> float:
        """Return the share of a device that a process has: less than one where CPU ranks outnumber the cores."""
        if self.constants.cores is None:
            return 1.0
        return min(1.0, self.constants.cores / min(world_size, self.gpus_per_node))


_SHEETS = "data sheet; NVLink or fabric both ways halved; adapters: "
TABLE = {
    hardware.name: hardware
    for hardware in (
        Hardware(
            "a100", 312.0, 156.0, 19.5, 85.0, 2039.0, 300.0, 25.0, 400.0, 0.877, 0.60, 0.33, True,
            f"NVIDIA A100 80GB SXM {_SHEETS}DGX, 200 Gb/s a GPU. Shares: fit; FlashAttention-2 (arXiv:2307.08691)",
        ),
        Hardware(
            "a100-40", 312.0, 156.0, 19.5, 42.3, 1555.0, 300.0, 25.0, 400.0, 0.877, 0.60, 0.33, True,
            f"NVIDIA A100 40GB SXM {_SHEETS}DGX, 200 Gb/s a GPU. Shares as A100 80GB",
        ),
        Hardware(
            "h100", 989.5, 494.5, 67.0, 85.0, 3350.0, 450.0, 50.0, 700.0, 0.735, 0.60, 0.186, True,
            f"NVIDIA H100 SXM {_SHEETS}DGX, 400 Gb/s a GPU. Shares: fit; FlashAttention-3 (arXiv:2407.08608)", 1979.0,
        ),
        Hardware(
            "h100-96-500w", 989.5, 494.5, 67.0, 102.0, 2400.0, 450.0, 50.0, 500.0, 0.740, 0.604, 0.188, True,
            "H100 of 96 GB HBM2e at 500 W, Meta's Grand Teton (pytorch/torchtitan, benchmarks). Shares: fit", 1979.0,
        ),
        Hardware(
            "h100-pcie", 756.0, 378.0, 51.2, 85.0, 2039.0, 64.0, 25.0, 350.0, 0.60, 0.50, 0.155, False,
            f"NVIDIA H100 PCIe {_SHEETS}PCIe 5.0 x16 between devices. Shares assumed: 350 W", 1513.0,
        ),
        Hardware(
            "h200", 989.5, 494.5, 67.0, 149.8, 4800.0, 450.0, 50.0, 700.0, 0.735, 0.60, 0.186, False,
            f"NVIDIA H200 SXM {_SHEETS}DGX, 400 Gb/s a GPU. Shares as H100, the same chip", 1979.0,
        ),
        Hardware(
            "b200", 2250.0, 1125.0, 75.0, 191.5, 8000.0, 900.0, 50.0, 1000.0, 0.70, 0.50, 0.155, False,
            f"NVIDIA HGX B200 {_SHEETS}DGX, 400 Gb/s a GPU. Shares assumed", 4500.0, 9000.0,
        ),
        Hardware(
            "gb200", 2500.0, 1250.0, 80.0, 198.0, 8000.0, 900.0, 50.0, 1200.0, 0.70, 0.50, 0.155, False,
            f"NVIDIA GB200 NVL72 {_SHEETS}400 Gb/s a GPU; --gpus-per-node 72 for a rack of one NVLink. Shares assumed",
            5000.0, 10000.0,
        ),
        Hardware(
            "b300", 2250.0, 1125.0, 75.0, 270.0, 8000.0, 900.0, 100.0, 1100.0, 0.70, 0.50, 0.155, False,
            f"NVIDIA HGX B300 {_SHEETS}DGX, 800 Gb/s a GPU. Shares assumed", 4500.0, 13500.0,
        ),
        Hardware(
            "gb300", 2500.0, 1250.0, 80.0, 279.0, 8000.0, 900.0, 100.0, 1400.0, 0.70, 0.50, 0.155, False,
            f"NVIDIA GB300 NVL72 {_SHEETS}800 Gb/s a GPU; --gpus-per-node 72 for a rack of one NVLink. Shares assumed",
            5000.0, 15000.0,
        ),
        Hardware(
            "mi300x", 1307.4, 653.7, 163.4, 206.1, 5300.0, 448.0, 50.0, 750.0, 0.55, 0.40, 0.20, False,
            f"AMD Instinct MI300X {_SHEETS}400 Gb/s a GPU, 7 links of 64 GB/s inside. Shares assumed", 2614.9,
        ),
        Hardware(
            "mi355x", 2516.6, 157.3, 157.3, 309.2, 8000.0, 537.6, 50.0, 1400.0, 0.55, 0.40, 0.20, False,
            f"AMD Instinct MI355X {_SHEETS}400 Gb/s a GPU, 7 links of 76.8 GB/s inside. Shares assumed",
            5033.2, 10066.3,
        ),
        Hardware(
            "l40s", 362.0, 183.0, 91.6, 47.7, 864.0, 32.0, 25.0, 350.0, 0.60, 0.45, 0.25, False,
            f"NVIDIA L40S {_SHEETS}PCIe 4.0 x16 between devices, 200 Gb/s a GPU. Shares assumed", 733.0,
        ),
        Hardware(
            "cpu", 0.1, 0.1, 0.1, 8.0, 10.0, 2.0, 1.0, 65.0, 0.5, 0.3, 0.3, False,
            "no data sheet: round figures for one process of a laptop",
        ),
    )
}  # fmt: skip
"""Rows by name."""

_ALIKE = 0.03


def hardware(name: str, **figures: float | None) -> Hardware:
    """Return a row of the table, with the values that were given in place of its own.

    A chip is sold with several memories and at several powers: where the given memory bandwidth is the bandwidth of
    another row of the same chip, such as the A100 with 40 GB (1,555 GB/s), the other figures come from that row.
    """
    row = TABLE[name]
    bandwidth = figures.get("memory_bandwidth_gb_s")
    if bandwidth is not None:
        same = [other for other in TABLE.values() if other.peak_16bit_tflops == row.peak_16bit_tflops]
        row = min(same, key=lambda other: (abs(other.memory_bandwidth_gb_s - bandwidth), other.name != name))
        if abs(row.memory_bandwidth_gb_s / bandwidth - 1) > _ALIKE:
            row = TABLE[name]
    return dataclasses.replace(row, **{key: value for key, value in figures.items() if value is not None})


def constants_of(device: Hardware) -> Constants:
    """Return the constants of a kind of device."""
    return Constants() if device.is_gpu else CPU
