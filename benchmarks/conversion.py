"""How fast does tools/convert_checkpoint.py convert, beside `cp` of the same file, and with how much memory?

    OMP_NUM_THREADS=1 python benchmarks/conversion.py /dev/shm/conversion --json benchmarks/results/conversion-DATE.json

Makes a Llama-shaped model of 2.1 GB (bf16, random bits) in the folder, and takes turns: cp, from-hf, to-hf. The
exported file must be the imported one, byte for byte. States the fastest turn of each and its peak memory.
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[1]
MODEL = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def write_model(folder: Path) -> None:
    """Write the model. In a process of its own: a child's peak memory begins with its parent's."""
    import numpy as np

    from megatron_ext.checkpoint.hf_safetensors import create
    from megatron_ext.config.families import FAMILIES, arrangement
    from megatron_ext.config.hf_config import read_hf_config
    from megatron_ext.config.resolve import Facts, resolve

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = resolve(read_hf_config(folder)[1], Facts())
    shapes: dict[str, Any] = {}
    for part in arrangement(config, FAMILIES["llama"]):
        shapes |= part.tensor_shapes()
    path = folder / "model.safetensors"
    create(path, shapes, "BF16")
    bits = np.memmap(path, np.uint8, "r+")
    start = 8 + int.from_bytes(bytes(bits[:8]), "little")
    bits[start:] = np.random.default_rng(0).integers(0, 256, bits.size - start, np.uint8)


def timed(command: list[str]) -> dict[str, float]:
    """Seconds on the clock and of the processor, and peak memory, of a command that must succeed."""
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_memory_gb": usage.ru_maxrss * 1024 / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of conversion beside cp.")
    parser.add_argument("folder", type=Path, help="made, and removed at the end; 8.5 GB")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    source, copy, ours, back = (options.folder / name for name in ("hf", "copy", "ours", "back"))
    writer = multiprocessing.get_context("spawn").Process(target=write_model, args=(source,))
    writer.start()
    writer.join()
    size = (source / "model.safetensors").stat().st_size
    convert = [sys.executable, "tools/convert_checkpoint.py"]
    commands = {
        "cp": ["cp", "-r", str(source), str(copy)],
        "import of torch alone": [sys.executable, "-c", "import torch"],
        "from-hf": [*convert, "from-hf", "--load", str(source), "--save", str(ours)],
        "to-hf": [*convert, "to-hf", "--no-verify", "--load", str(ours), "--save", str(back)],
    }
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    load = os.getloadavg()[0]
    for _ in range(options.turns):
        for path in (copy, ours, back):
            shutil.rmtree(path, ignore_errors=True)
        for name, command in commands.items():
            turns[name].append(timed(command))
    if not filecmp.cmp(source / "model.safetensors", back / "model.safetensors", shallow=False):
        sys.exit("the exported file is not the imported one")
    shutil.rmtree(options.folder)
    best = {name: min(found, key=lambda turn: turn["seconds"]) for name, found in turns.items()}
    for name, turn in best.items():
        speed = size / turn["seconds"] / 1e9
        print(
            f"{name:22} {turn['seconds']:6.2f} s {speed:6.2f} GB/s, {best['cp']['seconds'] / turn['seconds']:.2f}x of "
            f"cp, {turn['processor_seconds']:6.2f} s of processor, peak {turn['peak_memory_gb']:.2f} GB"
        )
    machine = {"cores": os.cpu_count(), "cpu": platform.processor() or platform.machine(), "load_average": load}
    content = {"date": f"{datetime.now(UTC):%Y-%m-%d}", "machine": machine, "bytes": size, "best": best, "turns": turns}
    if options.json:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
