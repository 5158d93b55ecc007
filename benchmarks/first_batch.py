"""Measures how long it takes until the first batch of a corpus of a trillion tokens, and in how much memory.

    python benchmarks/first_batch.py /tmp/trillion                  # both orders; takes 3 GB of disk and memory
    python benchmarks/first_batch.py /tmp/trillion --skip-shuffled  # --data-order formula alone

The corpus is synthetic: a .bin that is one large hole (2 TB that take no disk, all tokens 0) and a whole .idx. Each
line is a process of its own. The clock starts when the imports are done and covers opening and checking the files,
building or mapping the sample order, a validation split, and reading 8 samples. "without torch" reads the samples with
the training's dataset; the others read them with the training's loader, as torch tensors. "all of a training" has
imported what pretrain_gpt.py has, so that the difference of the two memory figures is what the data adds to a
training's process. The result is written to --output as JSON, with machine and date.
"""

import argparse
import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from megatron_ext.config.schema import Config, DataConfig, ModelConfig
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.indexed import HEADER, MAGIC, VERSION
from megatron_ext.tokenizer.simple import NullTokenizer

BATCH = 8
VOCAB_SIZE = 32000
_BLOCK = 1 << 20


def write_corpus(prefix: Path, tokens: int, document_tokens: int) -> int:
    """Write documents of `document_tokens` zeros, the last one shorter; return how many. This is done once."""
    documents = -(-tokens // document_tokens)
    bytes_of_index = HEADER.size + 12 * documents + 8 * (documents + 1)
    if Path(f"{prefix}.idx").exists() and Path(f"{prefix}.idx").stat().st_size == bytes_of_index:
        return documents
    with open(f"{prefix}.bin", "wb") as bin_:
        bin_.truncate(2 * tokens)

    def blocks() -> Any:
        for first in range(0, documents, _BLOCK):
            yield np.arange(first, min(first + _BLOCK, documents))

    with open(f"{prefix}.idx", "wb") as idx:
        idx.write(HEADER.pack(MAGIC, VERSION, 8, documents, documents + 1))
        for numbers in blocks():
            idx.write(np.minimum(document_tokens, tokens - numbers * document_tokens).astype("<i4").data)
        for numbers in blocks():
            idx.write((2 * numbers * document_tokens).astype("<i8").data)
        for numbers in blocks():
            idx.write(numbers.astype("<i8").data)
        idx.write(np.array([documents], "<i8").data)
    return documents


def resident(field: str) -> float:
    """Return VmRSS or VmHWM (its peak) of this process, in MB. This needs Linux."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def first_batch(prefix: str, order: str, samples: int, seq_length: int, imports: str) -> dict[str, Any]:
    """Return what one process measures."""
    torch_free = imports == "no torch"
    if not torch_free:
        from megatron_ext import device

        device.install("cpu")
        importlib.import_module("megatron_ext.data.loader")
        importlib.import_module("megatron_ext.data.shuffled_order" if order == "shuffled" else "torch")
        if imports == "all":
            for module in ("build", "trainer", "datasets", "callbacks.standard", "callbacks.memory_history"):
                importlib.import_module(f"megatron_ext.train.{module}")
    imported, before = time.perf_counter(), resident("VmRSS")
    config = Config(
        model=ModelConfig(seq_length=seq_length),
        data=DataConfig(
            data_path=(prefix,), split="999,1,0", data_order=order, data_cache_path=str(Path(prefix).parent / "cache")
        ),
    )
    dataset = build_datasets(config, NullTokenizer(VOCAB_SIZE), Splits(samples, BATCH, 0)).train
    assert dataset is not None
    if torch_free:
        assert "torch" not in sys.modules
        tokens = np.stack([dataset[index]["tokens"] for index in range(BATCH)])
    else:
        from megatron_ext.data.loader import BatchLoader

        loader = BatchLoader(
            dataset, vocab_size=VOCAB_SIZE, seq_length=seq_length, micro_batch_size=BATCH, dp_rank=0, dp_size=1
        )
        (batch,) = loader.global_batch(0, 1)
        assert batch.tokens is not None
        tokens = batch.tokens
    assert tuple(tokens.shape) == (BATCH, seq_length)
    return {
        "seconds_to_first_batch": time.perf_counter() - imported,
        "peak_resident_MB": resident("VmHWM"),
        "resident_MB_after_imports": before,
    }


def measure(name: str, order: str, options: argparse.Namespace, imports: str = "loader") -> dict[str, Any]:
    command = [sys.executable, __file__, options.folder, "--samples", str(options.samples), "--child", order]
    command += ["--seq-length", str(options.seq_length), "--imports", imports]
    started = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    seconds = time.perf_counter() - started
    if result.returncode:
        sys.exit(result.stderr)
    found = {"name": name, **json.loads(result.stdout.splitlines()[-1]), "seconds_of_the_process": seconds}
    print(
        f"{name:26} {found['seconds_to_first_batch']:8.2f} s to the first batch (the whole process {seconds:.1f} s)  "
        f"peak {found['peak_resident_MB']:.0f} MB, of which {found['resident_MB_after_imports']:.0f} after imports",
        flush=True,
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", help="for the corpus and the cache; both are left there")
    add("--samples", type=int, default=122_000_000)
    add("--seq-length", type=int, default=8192)
    add("--document-tokens", type=int, default=100_000)
    add("--skip-shuffled", action="store_true", help="do not measure megatron-core's order")
    add("--output", default=f"benchmarks/results/first_batch-{datetime.now():%Y-%m-%d}.json")
    add("--child", help=argparse.SUPPRESS)
    add("--imports", choices=("no torch", "loader", "all"), default="loader", help=argparse.SUPPRESS)
    options = parser.parse_args()
    prefix = Path(options.folder) / "trillion"
    if options.child:
        # The training split is 999 of 1,000 documents; the run takes as many samples as it has.
        samples = options.samples * 998 // 1000
        print(json.dumps(first_batch(str(prefix), options.child, samples, options.seq_length, options.imports)))
        return
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokens = options.samples * options.seq_length + 1
    documents = write_corpus(prefix, tokens, options.document_tokens)
    size = Path(f"{prefix}.idx").stat().st_size
    print(f"{tokens:,} tokens in {documents:,} documents, an index of {size / 1e6:.0f} MB")
    results = [
        measure("formula, without torch", "formula", options, "no torch"),
        measure("formula", "formula", options),
        measure("formula, all of a training", "formula", options, "all"),
    ]
    if not options.skip_shuffled:
        shutil.rmtree(prefix.parent / "cache", ignore_errors=True)
        results += [measure(f"shuffled, {start} start", "shuffled", options) for start in ("first", "second")]
    result = {
        "date": f"{datetime.now():%Y-%m-%d}",
        "machine": {
            "cpu": next(
                line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
            ),
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
            "python": platform.python_version(),
        },
        "tokens": tokens,
        "samples": options.samples,
        "documents": documents,
        "idx_bytes": size,
        "results": results,
    }
    Path(options.output).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
