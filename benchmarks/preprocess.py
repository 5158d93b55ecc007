"""How fast is tools/preprocess_data.py on one core? Cold process, one worker, the whole command.

    python benchmarks/preprocess.py runs/preprocess                       # ours, with and without the fast tokenizer
    python benchmarks/preprocess.py runs/preprocess --peer ../Megatron-LM # and Megatron-LM's own tool, from a checkout

The corpus is made of what the machine has: source code, documentation and other text files under Python's and the
system's folders, each different file once, and the empty ones too. The tokenizer is byte-level BPE with 32,768 entries
that is trained on a sample. Every command is run `--repeats` times; the line shows the fastest.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], "/usr/share", "/usr/include")
SUFFIXES = {".py", ".pyi", ".md", ".txt", ".rst", ".h", ".hpp", ".c", ".cpp", ".html", ".js", ".css", ".pl", ".pod"}


def text_files() -> Iterator[str]:
    """The text of every readable file of up to 2 MB, each content once but the empty one, which stays."""
    seen: set[bytes] = set()
    for source in SOURCES:
        for path in sorted(Path(source).rglob("*")):
            try:
                if path.suffix not in SUFFIXES or path.is_symlink() or path.stat().st_size > 2_000_000:
                    continue
                text = path.read_text("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.md5(text.encode()).digest()
            if digest not in seen or not text:
                seen.add(digest)
                yield text


def make_corpus(path: Path, megabytes: int) -> None:
    """Write up to so many MB of JSON lines."""
    with open(path, "wb") as file:
        for text in text_files():
            file.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
            if file.tell() >= megabytes * 1e6:
                return
        print(f"this machine has only {file.tell() / 1e6:.0f} MB of text")


@dataclass(frozen=True)
class Measurement:
    """Seconds on the clock, seconds of the processor (all threads and children), and peak memory of the process."""

    wall: float
    processor: float
    peak_bytes: int


def measure(command: list[str], environment: dict[str, str]) -> Measurement:
    """Run a command to its end; its output is shown only if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        sys.exit(f"{' '.join(command)}\n{output.decode(errors='replace')}\nexit code {process.returncode}")
    return Measurement(time.perf_counter() - start, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def commands(options: argparse.Namespace, corpus: Path, tokenizer: Path) -> dict[str, tuple[list[str], dict[str, str]]]:
    """Name -> command and its environment; every one writes <folder>/<name>_text_document.bin and .idx."""
    common = ["--input", str(corpus), "--append-eod", "--workers", "1", "--tokenizer-type", "HuggingFaceTokenizer"]
    common += ["--tokenizer-model", str(tokenizer), "--log-interval", "1000000", "--output-prefix"]
    ours = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
    single = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    found = {
        "fast": ([*ours, *common, str(options.folder / "fast")], single),
        "plain": ([*ours, "--plain-tokenizer", *common, str(options.folder / "plain")], single),
    }
    if options.peer is not None:
        peer = [options.peer_python, str(options.peer / "tools" / "preprocess_data.py")]
        found["peer"] = ([*peer, *common, str(options.folder / "peer")], {**single, "PYTHONPATH": str(options.peer)})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Speed of preprocessing on one core.")
    add = parser.add_argument
    add("folder", type=Path, help="folder for the corpus, the tokenizer and the outputs")
    add("--corpus", type=Path, help="JSON lines to use instead of making a corpus")
    add("--tokenizer", type=Path, help="Hugging Face folder to use instead of training a tokenizer")
    add("--megabytes", type=int, default=220, help="size of the corpus that is made")
    add("--repeats", type=int, default=3, help="runs of each of our commands; the peer runs once")
    add("--peer", type=Path, help="a checkout of Megatron-LM")
    add("--peer-python", default=sys.executable, help="Python with the peer's requirements (torch, transformers)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    corpus = options.corpus or options.folder / "corpus.jsonl"
    tokenizer = options.tokenizer or options.folder / "tokenizer"
    if not corpus.exists():
        make_corpus(corpus, options.megabytes)
    if not tokenizer.exists():
        train = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), "--input", str(corpus)]
        train += ["--output-dir", str(tokenizer), "--vocab-size", "32768", "--max-bytes", "20000000"]
        subprocess.run(train, check=True)
    megabytes = corpus.stat().st_size / 1e6
    print(f"{corpus}: {megabytes:.1f} MB")
    print("command    seconds   MB/s   processor seconds   MB/s of a core   peak MB   hash of .bin and .idx")
    for name, (command, environment) in commands(options, corpus, tokenizer).items():
        runs = [measure(command, environment) for _ in range(1 if name == "peer" else options.repeats)]
        best = min(runs, key=lambda run: run.processor)
        digest = hashlib.sha256()
        for suffix in (".bin", ".idx"):
            digest.update((options.folder / f"{name}_text_document{suffix}").read_bytes())
        print(
            f"{name:8} {best.wall:9.2f} {megabytes / best.wall:6.1f} {best.processor:19.2f} "
            f"{megabytes / best.processor:16.1f} {best.peak_bytes / 1e6:9.0f}   {digest.hexdigest()[:16]}",
            flush=True,
        )


if __name__ == "__main__":
    main()
