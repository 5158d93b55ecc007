"""One call for a machine with a GPU: is CUDA right, and how fast is it?

    python benchmarks/device_check.py --device cuda --output benchmarks/results

1. Right: small models for 20 steps on the CPU and on the device: in fp32 with TF32 off, where weights begin bitwise
   equal (a function of seed and name) and the first loss must agree within 1e-5, and in bf16, within 1e-2. They take
   the kernels that differ between the two: attention, packed documents, experts one by one and grouped.
2. Fast: a GPT-2 of 124M parameters and a Llama-shaped model of 1.3B in bf16; median of the logged steps after the
   first ten: tokens/s, model TFLOP/s (causal convention) and MFU where the device's peak is known.

With --device cpu the second part is left out and the first compares the CPU with itself.
"""

import json
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import NumericError
from megatron_ext.telemetry.jsonl import read_rows

ROOT = Path(__file__).resolve().parents[1]
LARGEST_FIRST_LOSS_DIFFERENCE = {"fp32": 1e-5, "bf16": 1e-2}
MOCK = "--mock-data --tokenizer-type NullTokenizer --eval-interval 0 --lr 1e-3 --lr-warmup-iters 10 "
LLAMA = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
NO_DROPOUT = "--hidden-dropout 0 --attention-dropout 0 "
SMALL = (
    "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --vocab-size 1000 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 20 --log-interval 1 " + NO_DROPOUT
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 "
PACKED = "--reset-position-ids --reset-attention-mask --eod-mask-loss "
RIGHT = {
    "Llama": LLAMA,
    "GPT-2, distributed optimizer": "--openai-gelu --use-distributed-optimizer ",
    "grouped queries, packed documents": LLAMA + "--group-query-attention --num-query-groups 2 " + PACKED,
    "experts": LLAMA + EXPERTS,
    "Llama, bf16": LLAMA + "--bf16 ",
    "packed documents, bf16": LLAMA + PACKED + "--bf16 ",
    "grouped experts, bf16": LLAMA + EXPERTS + "--moe-grouped-gemm --bf16 ",
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


def main(argv: list[str]) -> int:
    parser = ToolParser("Compare a device with the CPU, then measure how fast it trains.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what is checked and measured")
    parser.add_argument("--output", metavar="FOLDER", help="write the figures there as JSON")
    options = parser.parse_args(argv)
    figures: dict[str, Any] = {"machine": platform.processor() or platform.machine(), "device": options.device}
    figures["losses"] = {}
    for name, flags in RIGHT.items():
        figures["losses"][name] = compare_losses(name, flags, options.device)
        print(name, json.dumps(figures["losses"][name]), flush=True)
    if options.device == "cuda":
        figures["speed"] = {name: speed(flags) for name, flags in SPEED.items()}
        print(json.dumps(figures["speed"], indent=1), flush=True)
    if options.output:
        path = Path(options.output) / f"device-{options.device}-{datetime.now(UTC):%Y-%m-%d}.json"
        path.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def compare_losses(name: str, flags: str, device: str) -> dict[str, float]:
    """Largest differences between the losses of the device and of the CPU; raises NumericError if they part."""
    one, other = ([row["lm_loss"] for row in train(f"{SMALL} {flags} --device {kind}")] for kind in ("cpu", device))
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    tolerance = LARGEST_FIRST_LOSS_DIFFERENCE["bf16" if "--bf16" in flags else "fp32"]
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
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        return [row for row in read_rows(metrics) if "lm_loss" in row]


if __name__ == "__main__":
    run_tool(main)
