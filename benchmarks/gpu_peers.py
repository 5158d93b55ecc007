"""Runs one comparison of benchmarks/gpu_session.py: `gpu_peers.py DEVICE NAME`, in turns with our program.

NAME is `nanoGPT` (its own train.py, from the folder that the variable NANOGPT names, which must be a checkout of
karpathy/nanoGPT), or `Trainer` (Hugging Face's GPT-2 with its Trainer). Both are a GPT-2 of the same sizes on random
tokens, compiled on a GPU, in bf16. Ours runs eager and compiled. Prints RESULT and JSON: medians of milliseconds a
step, and how many times as fast ours is, the median over neighbouring turns; exit code 1 where the first losses are not
those of an untrained model. What is missing is said, and is no failure.
"""

import json
import math
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import gpu_trial
from benchmarks.gpu_cases import MOCK, NO_DROPOUT

TURNS = 2
TOLERANCE = 0.3
"""Nats by which the loss of an untrained model may differ from that of a uniform guess."""


@dataclass(frozen=True)
class Sizes:
    """A GPT-2 and its batch."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    microbatch: int
    microbatches: int


SIZES = {"cuda": Sizes(12, 768, 12, 1024, 50304, 32, 2), "cpu": Sizes(2, 64, 2, 32, 512, 2, 2)}
STEPS = {"cuda": (10, 30), "cpu": (3, 9)}
"""Steps that are not timed, and those that are."""

Times = tuple[list[float], float]
"""Milliseconds of the timed steps, and the first loss."""


def main(device: str, name: str) -> None:
    peer = {"nanoGPT": nanogpt, "Trainer": trainer}[name]
    missing = {"nanoGPT": _lacks_nanogpt, "Trainer": _lacks_transformers}[name]()
    if missing is not None:
        print("RESULT", json.dumps({"missing": missing}), flush=True)
        return
    kinds = {"ours": (), "ours, compiled": ("--torch-compile",)} if device == "cuda" else {"ours": ()}
    turns: list[dict[str, Times]] = []
    for _ in range(TURNS):
        made = {kind: ours(device, *flags) for kind, flags in kinds.items()}
        turns.append(made | {name: peer(device)})
    figures = compared(turns, name)
    print("RESULT", json.dumps(figures), flush=True)
    guess = math.log(SIZES[device].vocabulary)
    if any(abs(loss - guess) > TOLERANCE for loss in figures["first losses"].values()):
        sys.exit(1)


def compared(turns: list[dict[str, Times]], peer: str) -> dict[str, Any]:
    """Return the figures of all turns."""
    names = list(turns[0])
    medians = [{name: statistics.median(turn[name][0]) for name in names} for turn in turns]
    return {
        "ms a step": {name: statistics.median(turn[name] for turn in medians) for name in names},
        "times as fast": {
            name: statistics.median(turn[peer] / turn[name] for turn in medians) for name in names if name != peer
        },
        "first losses": {name: turns[0][name][1] for name in names},
    }


def ours(device: str, *more: str) -> Times:
    """Train by our program."""
    sizes, (warmup, timed) = SIZES[device], STEPS[device]
    flags = MOCK + NO_DROPOUT + " ".join(
        [
            f"--num-layers {sizes.layers} --hidden-size {sizes.hidden} --num-attention-heads {sizes.heads}",
            f"--seq-length {sizes.sequence} --vocab-size {sizes.vocabulary} --openai-gelu --bf16 --log-interval 1",
            f"--micro-batch-size {sizes.microbatch} --global-batch-size {sizes.microbatch * sizes.microbatches}",
            f"--train-iters {warmup + timed}",
            *more,
        ]
    )  # fmt: skip
    rows = gpu_trial.train(device, flags)
    return [row["elapsed_ms"] for row in rows[warmup:]], rows[0]["lm_loss"]


def nanogpt(device: str) -> Times:
    """Train by nanoGPT's own program, on tokens in its format, and read its log."""
    import numpy as np

    sizes, (warmup, timed) = SIZES[device], STEPS[device]
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "nanoGPT"
        program.mkdir()
        for name in ("train.py", "model.py", "configurator.py"):
            shutil.copy(Path(os.environ["NANOGPT"]) / name, program)
        tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, 1 << 20, dtype=np.uint16)
        (program / "data" / "random").mkdir(parents=True)
        for split in ("train", "val"):
            tokens.tofile(program / "data" / "random" / f"{split}.bin")
        # It takes 50,304 for its vocabulary where no meta.pkl says otherwise.
        (program / "data" / "random" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": sizes.vocabulary}))
        settings = {
            "dataset": "random", "device": device, "compile": device == "cuda", "dtype": "bfloat16",
            "n_layer": sizes.layers, "n_head": sizes.heads, "n_embd": sizes.hidden, "block_size": sizes.sequence,
            "batch_size": sizes.microbatch, "gradient_accumulation_steps": sizes.microbatches, "bias": True,
            "max_iters": warmup + timed, "eval_iters": 1, "eval_interval": 10**6, "learning_rate": 1e-3,
            "warmup_iters": 10, "log_interval": 1,
        }  # fmt: skip
        command = [sys.executable, "train.py", *(f"--{name}={value}" for name, value in settings.items())]
        said = subprocess.run(command, cwd=program, check=True, capture_output=True, text=True).stdout
    steps = re.findall(r"^iter \d+: loss ([\d.]+), time ([\d.]+)ms", said, re.MULTILINE)
    return [float(ms) for _, ms in steps[warmup:]], float(steps[0][0])


def trainer(device: str) -> Times:
    """Train Hugging Face's GPT-2 by its Trainer, in a process of its own: torch.compile stays its own affair."""
    command = [sys.executable, __file__, device, "--run-trainer"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (line,) = (line for line in said.splitlines() if line.startswith("TIMES "))
    times, loss = json.loads(line.removeprefix("TIMES "))
    return times, loss


def run_trainer(device: str) -> None:
    """Run what `trainer` starts."""
    import time

    import torch
    import transformers

    sizes, (warmup, timed) = SIZES[device], STEPS[device]
    shape = transformers.GPT2Config(
        vocab_size=sizes.vocabulary, n_positions=sizes.sequence, n_embd=sizes.hidden, n_layer=sizes.layers,
        n_head=sizes.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(shape)
    count = (warmup + timed) * sizes.microbatch * sizes.microbatches
    tokens = torch.randint(sizes.vocabulary, (min(count, 4096), sizes.sequence))
    rows = [{"input_ids": row, "labels": row} for row in tokens] * (count // len(tokens) + 1)
    ends: list[float] = []

    class Ends(transformers.TrainerCallback):
        def on_step_end(self, *_given: Any, **_more: Any) -> None:
            if device == "cuda":
                torch.cuda.synchronize()
            ends.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        given = transformers.TrainingArguments(
            folder, max_steps=warmup + timed, per_device_train_batch_size=sizes.microbatch,
            gradient_accumulation_steps=sizes.microbatches, bf16=True, torch_compile=device == "cuda",
            use_cpu=device == "cpu", optim="adamw_torch_fused" if device == "cuda" else "adamw_torch",
            learning_rate=1e-3, warmup_steps=10, save_strategy="no", report_to=[], logging_steps=1,
            disable_tqdm=True, max_grad_norm=1.0,
        )  # fmt: skip
        run = transformers.Trainer(model, given, train_dataset=rows, callbacks=[Ends()])  # pyright: ignore[reportArgumentType]
        run.train()
    losses = [row["loss"] for row in run.state.log_history if "loss" in row]
    milliseconds = [1000.0 * (after - before) for before, after in zip(ends[warmup - 1 :], ends[warmup:], strict=False)]
    print("TIMES", json.dumps([milliseconds, float(losses[0])]), flush=True)


def _lacks_nanogpt() -> str | None:
    folder = os.environ.get("NANOGPT")
    if folder is None:
        return "the variable NANOGPT, the folder of a checkout of karpathy/nanoGPT"
    absent = [name for name in ("train.py", "model.py", "configurator.py") if not (Path(folder) / name).is_file()]
    return f"{', '.join(absent)} in {folder}" if absent else None


def _lacks_transformers() -> str | None:
    from benchmarks.gpu_session import missing

    return ", ".join(missing(("transformers", "accelerate"))) or None


if __name__ == "__main__":
    if sys.argv[2:] == ["--run-trainer"]:
        run_trainer(sys.argv[1])
    else:
        main(*sys.argv[1:])
