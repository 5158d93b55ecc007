"""Measures how fast tools/convert_checkpoint.py converts, next to `cp` of the same file, and with how much memory.

    python benchmarks/conversion.py /dev/shm/conversion runs/conversion --output benchmarks/results

Makes a Llama-shaped model of 2.1 GB (bf16, random bits) in each folder (memory and a disk are of interest), and takes
turns: cp, from-hf, to-hf. All of them are done when what they wrote is flushed (`cp` is followed by `sync` of its
files). The exported file must be the imported one, byte for byte. States the fastest turn of each and its peak memory.
--output FOLDER records the table and the machine as JSON and Markdown.
"""

import argparse
import filecmp
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.recording import heading, sentence, tell

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
    """Write the model. This is done in a process of its own: a child's peak memory begins with its parent's."""
    import numpy as np

    from megatron_ext.config.resolve import Facts, resolve
    from megatron_ext.plugins.families.hf_config import read_hf_config
    from megatron_ext.plugins.families.registry import FAMILIES
    from megatron_ext.plugins.families.state_dict_mapping import state_dict_mapping
    from megatron_ext.plugins.huggingface.safetensors import create

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = resolve(read_hf_config(folder)[1], Facts())
    shapes: dict[str, Any] = {}
    for part in state_dict_mapping(config, FAMILIES["llama"]):
        shapes |= part.tensor_shapes()
    path = folder / "model.safetensors"
    create(path, shapes, "BF16")
    bits = np.memmap(path, np.uint8, "r+")
    start = 8 + int.from_bytes(bytes(bits[:8]), "little")
    bits[start:] = np.random.default_rng(0).integers(0, 256, bits.size - start, np.uint8)
    bits.flush()


def timed(command: list[str]) -> dict[str, float]:
    """Return seconds on the clock and of the processor, and peak memory, of a command that must succeed."""
    # The modules are compiled in the first turn and kept, as they are for who uses the program twice.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    start = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": usage.ru_utime + usage.ru_stime,
        "peak_memory_gb": usage.ru_maxrss * 1024 / 1e9,
    }


def measure(folder: Path, turns: int) -> dict[str, Any]:
    """Return the turns of every command in a folder, which is made and removed."""
    source, copy, ours, back = (folder / name for name in ("hf", "copy", "ours", "back"))
    writer = multiprocessing.get_context("spawn").Process(target=write_model, args=(source,))
    writer.start()
    writer.join()
    size = (source / "model.safetensors").stat().st_size
    kind = subprocess.run(["stat", "-f", "-c", "%T", source], capture_output=True, text=True, check=True).stdout.strip()
    convert = [sys.executable, "tools/convert_checkpoint.py"]
    imports = "import megatron_ext.plugins.huggingface.importer, megatron_ext.plugins.huggingface.exporter"
    commands = {
        "cp": ["sh", "-c", 'cp -r "$0" "$1" && sync "$1"/*', str(source), str(copy)],
        "start and imports alone": [sys.executable, "-c", imports],
        "from-hf": [*convert, "from-hf", "--load", str(source), "--save", str(ours)],
        "to-hf": [*convert, "to-hf", "--no-verify", "--load", str(ours), "--save", str(back)],
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for _ in range(turns):
        for path in (copy, ours, back):
            shutil.rmtree(path, ignore_errors=True)
        os.sync()  # what was removed
        for name, command in commands.items():
            found[name].append(timed(command))
    if not filecmp.cmp(source / "model.safetensors", back / "model.safetensors", shallow=False):
        sys.exit("the exported file is not the imported one")
    shutil.rmtree(folder)
    best = {name: min(of_one, key=lambda turn: turn["seconds"]) for name, of_one in found.items()}
    return {"file_system": kind, "bytes": size, "best": best, "turns": found}


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    lines = [
        f"# Conversion beside cp, {record['date']}",
        "",
        f"{sentence(record)} One process; the fastest of the turns, flushing included.",
        "",
        "| folder | command | s | GB/s | speed of cp | processor s | peak GB |",
        "|---|---|---|---|---|---|---|",
    ]
    for folder, result in record["folders"].items():
        for name, turn in result["best"].items():
            seconds = turn["seconds"]
            speed = [f"{result['bytes'] / seconds / 1e9:.2f}", f"{result['best']['cp']['seconds'] / seconds:.2f}x"]
            columns = " | ".join(speed if "alone" not in name else ["", ""])
            lines.append(
                f"| {folder} ({result['file_system']}) | {name} | {seconds:.2f} | {columns} | "
                f"{turn['processor_seconds']:.2f} | {turn['peak_memory_gb']:.2f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of conversion beside cp.")
    parser.add_argument("folders", type=Path, nargs="+", help="each is made, and removed at the end; 8.5 GB")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--output", type=Path, help="folder for the .json and .md of this run")
    options = parser.parse_args()
    record = heading()
    record["folders"] = {str(folder): measure(folder, options.turns) for folder in options.folders}
    tell(options.output, "conversion", record, report(record))


if __name__ == "__main__":
    main()
