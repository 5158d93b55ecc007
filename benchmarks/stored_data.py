"""Measures how long steps wait for data that lies in a store, behind a link of a set speed and delay.

    python benchmarks/stored_data.py                    # a table; the store is this process's memory
    python benchmarks/stored_data.py --seconds 0.2 --steps 40

The store answers each request after --delay seconds and gives all of them together --rate bytes a second. A step
"computes" for --seconds (it sleeps) and takes --batch samples of --seq-length tokens, as one data-parallel rank does.
Each row is a link: what the steps read in a second, as a share of it. A step waits where the loader has not all of its
batch when the one before is done. "read ahead" is what training does with --data-path s3://...; "as they are asked
for" is the same loader with its background threads alone.
"""

import argparse
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fsspec
import numpy as np
from fsspec.implementations.memory import MemoryFileSystem
from recording import heading, keep, sentence

from megatron_ext import device
from megatron_ext.config.schema import Config, DataConfig, ModelConfig
from megatron_ext.data.corpus import Splits, build_datasets
from megatron_ext.data.indexed import IndexedWriter
from megatron_ext.data.loader import BatchLoader
from megatron_ext.tokenizer.simple import NullTokenizer

PREFIX = "memory://bench/corpus"
SHARES = (0.25, 0.5, 0.8, 1.25)
DOCUMENT = 1000


class Link:
    """A delay for each request, and a rate that all share."""

    def __init__(self, delay: float, rate: float):
        self.delay, self.rate = delay, rate
        self.bytes = 0
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, size: int) -> None:
        """Wait as long as a request of `size` bytes takes."""
        with self._lock:
            begin = max(time.perf_counter() + self.delay, self._free_at)
            self._free_at = begin + size / self.rate
            until = self._free_at
            self.bytes += size
        time.sleep(max(0.0, until - time.perf_counter()))


def throttle(link: Link) -> None:
    """Let memory:// be read through a link."""
    plain = MemoryFileSystem.cat_file

    def cat_file(self: MemoryFileSystem, path: str, start: int | None = None, end: int | None = None, **more: Any):
        found = plain(self, path, start=start, end=end, **more)
        link.carry(len(found))
        return found

    MemoryFileSystem.cat_file = cat_file


def write_corpus(folder: Path, tokens: int) -> None:
    """Put a corpus of documents of 1,000 tokens into the store."""
    with IndexedWriter(folder / "corpus", np.uint16) as writer:
        ids = np.random.default_rng(0).integers(0, 1000, tokens).astype(np.uint16)
        writer.add_tokens(ids.tobytes(), [DOCUMENT] * (tokens // DOCUMENT))
    system = fsspec.filesystem("memory")
    for suffix in (".bin", ".idx"):
        system.pipe(f"/bench/corpus{suffix}", (folder / f"corpus{suffix}").read_bytes())


def measure(options: argparse.Namespace, order: str, ahead: bool, folder: Path) -> dict[str, float]:
    """Return the seconds that a step waits: in the mean, at most, and of the first."""
    data = DataConfig(data_path=(PREFIX,), split="1", data_order=order, data_cache_path=str(folder / "cache"))
    config = Config(model=ModelConfig(seq_length=options.seq_length), data=data)
    train = build_datasets(config, NullTokenizer(1000), Splits(options.steps * options.batch, 0, 0)).train
    assert train is not None
    loader = BatchLoader(
        train,
        vocab_size=1000,
        seq_length=options.seq_length,
        micro_batch_size=options.batch // 4,
        dp_rank=0,
        dp_size=1,
        num_workers=2,
        reads_ahead=ahead,
    )
    waits = []
    for step in range(options.steps):
        begin = time.perf_counter()
        loader.global_batch(step * options.batch, 4)
        waits.append(time.perf_counter() - begin)
        time.sleep(options.seconds)
    loader.close()
    return {"first": waits[0], "mean": float(np.mean(waits[1:])), "longest": max(waits[1:])}


def main() -> None:
    """Measure every link and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.25, help="what a step computes")
    parser.add_argument("--delay", type=float, default=0.05, help="of a request")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device.install("cpu")  # before megatron-core is imported
    record: dict[str, Any] = heading() | {"settings": {**vars(options), "output": None}, "rows": []}
    needed = 2 * options.batch * options.seq_length / options.seconds
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        documents = options.steps * options.batch * options.seq_length // DOCUMENT + 100
        write_corpus(Path(name), documents * DOCUMENT)
        plain = MemoryFileSystem.cat_file
        for order in ("formula", "shuffled"):
            for share in SHARES:
                for ahead in (True, False):
                    MemoryFileSystem.cat_file = plain
                    throttle(Link(options.delay, needed / share))
                    row = {"order": order, "share": share, "ahead": ahead}
                    row |= measure(options, order, ahead, Path(name))
                    record["rows"].append(row)
                    print(row, flush=True)
    keep(options.output, "stored_data", record, markdown(record, options, needed))


def markdown(record: dict[str, Any], options: argparse.Namespace, needed: float) -> str:
    """Return the table as text."""
    lines = [
        "# Steps that wait for a store",
        "",
        sentence(record),
        "",
        f"A step computes {options.seconds} s and reads {options.batch} samples of {options.seq_length} tokens, "
        f"{needed / 1e6:.2f} MB a second; each request is answered after {1000 * options.delay:.0f} ms. Seconds that "
        f"the {options.steps - 1} steps after the first waited for their batch.",
        "",
        "| order | of the link | read ahead: mean | longest | as they are asked for: mean | longest |",
        "|---|---|---|---|---|---|",
    ]
    for number in range(0, len(record["rows"]), 2):
        one, other = record["rows"][number : number + 2]
        lines.append(
            f"| {one['order']} | {one['share']:.0%} | {one['mean']:.3f} | {one['longest']:.3f} | {other['mean']:.3f} | "
            f"{other['longest']:.3f} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
