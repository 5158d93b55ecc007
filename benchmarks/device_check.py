"""One call for a machine with a GPU: is CUDA right, and how fast is it?

    python benchmarks/device_check.py --device cuda --output benchmarks/results

1. Right: small models for 20 steps on the CPU and on the device: in fp32 with TF32 off, where weights begin bitwise
   equal (a function of seed and name) and the first loss must agree within 1e-5, and in bf16, within 1e-2. They take
   the kernels that differ between the two (attention, packed documents, experts one by one and grouped) and what moves
   tensors between host and device or between dtypes: every sharding, offload, recomputation, fp16, torch.compile.
2. Fast: a GPT-2 of 124M parameters and a Llama-shaped model of 1.3B in bf16; median of the logged steps after the
   first ten: tokens/s, model TFLOP/s (causal convention) and MFU where the device's peak is known.

With --device cpu the second part is left out and the first compares the CPU with itself. What fails does not keep the
rest from running. Exit codes: 0 all is right, 70 something is not.
"""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import NumericError
from megatron_ext.telemetry.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[1]
LARGEST_FIRST_LOSS_DIFFERENCE = {32: 1e-5, 16: 1e-2}
"""By bits of the weights."""
MOCK = "--mock-data --tokenizer-type NullTokenizer --eval-interval 0 --lr 1e-3 --lr-warmup-iters 10 "
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
SMALL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 20 --log-interval 1 " + NO_DROPOUT
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss "
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy "
RECOMPUTE = "--recompute-granularity selective --recompute-modules core_attn mlp layernorm "
RIGHT = {
    "Llama": LLAMA,
    "GPT-2, distributed optimizer": "--openai-gelu --use-distributed-optimizer ",
    "grouped queries, packed documents": LLAMA + "--group-query-attention --num-query-groups 2 " + PACKED,
    "experts": LLAMA + EXPERTS,
    "Llama, bf16": LLAMA + "--bf16 ",
    "packed documents, bf16": LLAMA + PACKED + "--bf16 ",
    "grouped experts, bf16": LLAMA + EXPERTS + "--moe-grouped-gemm --bf16 ",
    "fp16, distributed optimizer": LLAMA + "--fp16 --initial-loss-scale 1024 --use-distributed-optimizer ",
    "layers recomputed": LLAMA + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 ",
    "parts recomputed, bf16": LLAMA + RECOMPUTE + "--bf16 ",
    "ZeRO-2, bf16": LLAMA + FSDP + "optim_grads --bf16 ",
    "ZeRO-3, bf16": LLAMA + FSDP + "optim_grads_params --bf16 ",
    "ZeRO-3, experts": LLAMA + EXPERTS + FSDP + "optim_grads_params ",
    "FSDP2": LLAMA + "--use-torch-fsdp2 ",
    "FSDP2, bf16": LLAMA + "--use-torch-fsdp2 --bf16 ",
    "FSDP2 in host memory": LLAMA + "--use-torch-fsdp2 --torch-fsdp2-cpu-offload ",
    "FSDP2 in host memory, bf16": LLAMA + "--use-torch-fsdp2 --torch-fsdp2-cpu-offload --bf16 ",
    "half of the optimizer in host memory": (
        LLAMA + "--use-distributed-optimizer --optimizer-cpu-offload --optimizer-offload-fraction 0.5 "
    ),
    "optimizer in host memory, bf16": LLAMA + "--use-distributed-optimizer --optimizer-cpu-offload --bf16 ",
    "compiled": LLAMA + "--torch-compile ",
}
SPEED = {
    "GPT-2 124M, sequences of 1,024": (
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 --vocab-size 50257 --openai-gelu "
        "--micro-batch-size 32 --global-batch-size 64 " + NO_DROPOUT
    ),
    "Llama-shaped 1.3B, sequences of 2,048": (
        "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 5504 --seq-length 2048 "
        "--vocab-size 32000 --untie-embeddings-and-output-weights --micro-batch-size 4 --global-batch-size 16 "
        + LLAMA
        + NO_DROPOUT
    ),
}
WARMUP_STEPS, TIMED_STEPS = 10, 50
CORES_OF_A_RUN = 4


def main(argv: list[str]) -> int:
    parser = ToolParser("Compare a device with the CPU, then measure how fast it trains.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what is checked and measured")
    parser.add_argument("--output", metavar="FOLDER", help="write the figures there as JSON")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "device": options.device}
    figures["losses"] = {}
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // CORES_OF_A_RUN)) as pool:
        for name, found in zip(RIGHT, pool.map(partial(losses_or_failure, options.device), RIGHT), strict=True):
            figures["losses"][name] = found
            print(name, json.dumps(found), flush=True)
    wrong = [name for name, found in figures["losses"].items() if isinstance(found, str)]
    if options.device == "cuda":
        figures["speed"] = {name: speed(flags) for name, flags in SPEED.items()}
        print(json.dumps(figures["speed"], indent=1), flush=True)
    if options.output:
        path = Path(options.output) / f"device-{options.device}-{datetime.now(UTC):%Y-%m-%d}.json"
        path.write_text(json.dumps(figures, indent=1) + "\n")
    if wrong:
        raise NumericError(f"{len(wrong)} of {len(RIGHT)} are wrong: {'; '.join(wrong)}. The reasons are above.")
    return 0


def losses_or_failure(device: str, name: str) -> dict[str, float] | str:
    """What `compare_losses` returns, or why it failed."""
    try:
        return compare_losses(name, RIGHT[name], device)
    except (NumericError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or ""
        return "\n".join([str(error), *said.splitlines()[-20:]])


def compare_losses(name: str, flags: str, device: str) -> dict[str, float]:
    """Largest differences between the losses of the device and of the CPU; raises NumericError if they part."""
    one, other = ([row["lm_loss"] for row in train(f"{SMALL} {flags} --device {kind}")] for kind in ("cpu", device))
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    tolerance = LARGEST_FIRST_LOSS_DIFFERENCE[16 if "--bf16" in flags or "--fp16" in flags else 32]
    if not differences[0] <= tolerance:
        raise NumericError(
            f"{name}: first loss {other[0]!r} on {device}, {one[0]!r} on the CPU, more than {tolerance} apart. Look at "
            "docs/parity.md for what layouts agree within."
        )
    return {"first step": differences[0], "20 steps": max(differences)}


def speed(flags: str) -> dict[str, float | None]:
    """Medians over the timed steps of a run in bf16."""
    rows = train(f"{flags} --device cuda --bf16 --log-interval 1 --train-iters {WARMUP_STEPS + TIMED_STEPS}")
    timed = rows[WARMUP_STEPS:]
    return {
        name: None if timed[0][name] is None else statistics.median(row[name] for row in timed)
        for name in ("elapsed_ms", "tokens_per_second", "tflops_per_gpu", "mfu", "peak_memory_bytes")
    }


def train(flags: str) -> list[dict[str, Any]]:
    """The logged steps of one run of the program."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [sys.executable, "pretrain_gpt.py", *shlex.split(MOCK + flags), "--metrics-file", str(metrics)]
        subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return [row for row in read_rows(metrics) if "lm_loss" in row]


if __name__ == "__main__":
    run_tool(main)
