"""The constants of the time model, each with its source or its fit.

Nine numbers are fitted to 162 published runs, tests/golden/published_runs.jsonl and, at half their weight,
published_runs_llm_foundry.csv (`python benchmarks/planner.py --fit` computes them again): `edge`, `activations`,
`straggling`, `fsdp_shown`, and in the table of devices the shares of the peak that large matrix products reach on A100,
H100 and H100 limited to 500 W, and attention in programs of FSDP on A100 and H100. The others are taken from
publications, or assumed where they say so.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constants:
    """What no data sheet says."""

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
    """Times that activations go through the memory for each time that the sum of reads and writes in plan/estimate.py
    counts them, over the bandwidth of the data sheet: casts, copies, reductions and what does not reach the
    bandwidth. Fitted."""

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
    """The same for a microbatch's passes through one chunk, without its layers: schedule, batch, embedding, loss."""

    calls_of_a_step: float = 0.0
    """The same for a step, once a process: batches, clipping, the optimizer's call, logging."""

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
"""For CPU ranks: nothing is hidden where computation and traffic share the cores. A hop is what gloo
costs a rank in CPU time for small tensors: 0.2 to 0.6 ms, from sums, gathers, broadcasts and messages of 256 bytes
between 2 and 4 ranks (torch 2.15, two cores). The program's own calls: `benchmarks/planner_cpu.py --calls`."""

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
"""The same from one run to another of one program and machine: 0.053, and 0.037."""

ASSUMED_PROGRAMS_DIFFER = 0.22
"""The first for devices of which no run was fitted: what ASSUMED_RANGE stands for."""
