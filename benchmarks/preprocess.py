"""Measures how fast tools/preprocess_data.py is on one core: cold process, one worker, the whole command.

    python benchmarks/preprocess.py runs/preprocess                       # ours, with and without the fast tokenizer
    python benchmarks/preprocess.py runs/preprocess --peer ../Megatron-LM # and Megatron-LM's own tool, from a checkout
    python benchmarks/preprocess.py runs/preprocess --tokenizers sentencepiece-bpe sentencepiece-unigram tiktoken gpt2

The corpus is made of what the machine has: source code, documentation and other text files under Python's and the
system's folders, each different file once, and the empty ones too. The tokenizers have 32,768 entries (SentencePiece
unigram 16,384) and are trained on a sample. Processor seconds are those of all threads and processes of a command;
every command but the peer is run `--repeats` times, and the fastest counts. --output FOLDER records the table and the
machine as JSON and Markdown.
"""

import argparse
import base64
import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.process_tree import Measured, measure

ROOT = Path(__file__).resolve().parents[1]
SOURCES = (sysconfig.get_paths()["purelib"], sysconfig.get_paths()["stdlib"], "/usr/share", "/usr/include")
SUFFIXES = {".py", ".pyi", ".md", ".txt", ".rst", ".h", ".hpp", ".c", ".cpp", ".html", ".js", ".css", ".pl", ".pod"}
ENTRIES = {"sentencepiece-unigram": 16384}  # its trainer finds fewer pieces in the sample
COMMANDS = ("fast", "plain", "peer")


def text_files() -> Iterator[str]:
    """Yield the text of every readable file of up to 2 MB, each content once but the empty one, which stays."""
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


def describe_corpus(path: Path) -> dict[str, Any]:
    """Return the size, documents, empty ones, and the share of the bytes in documents that are there once."""
    counts: dict[bytes, int] = {}
    sizes: dict[bytes, int] = {}
    empty = documents = 0
    with open(path, "rb") as file:
        for line in file:
            digest = hashlib.md5(line).digest()
            counts[digest] = counts.get(digest, 0) + 1
            sizes[digest] = len(line)
            documents += 1
            empty += len(line) < 20 and json.loads(line)["text"] == ""
    once = sum(size for digest, size in sizes.items() if counts[digest] == 1)
    return {
        "bytes": path.stat().st_size,
        "documents": documents,
        "empty_documents": empty,
        "share_of_bytes_unrepeated": round(once / path.stat().st_size, 4),
    }


def train(folder: Path, corpus: Path, kind: str, max_bytes: int) -> Path:
    """Train a tokenizer on a sample of the corpus, if it is not there yet."""
    tokenizer = folder / kind
    if not tokenizer.exists():
        command = [sys.executable, str(ROOT / "tools" / "train_tokenizer.py"), "--input", str(corpus), "--type", kind]
        command += ["--output-dir", str(tokenizer), "--max-bytes", str(max_bytes)]
        command += ["--vocab-size", str(ENTRIES.get(kind, 32768))]
        subprocess.run(command, check=True)
    return tokenizer


def tokenizer_flags(kind: str, folder: Path, corpus: Path) -> list[str]:
    """Return the flags of a tokenizer of this kind; all byte-level ones have the same merges."""
    if kind.startswith("sentencepiece"):
        model = train(folder, corpus, kind, 5_000_000) / "tokenizer.model"
        return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(model)]
    byte_level = train(folder, corpus, "hf-bpe", 20_000_000)
    if kind == "huggingface":
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(byte_level)]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(byte_level / "tokenizer.json"))
    if kind == "gpt2":
        tokenizer.model.save(str(byte_level))
        files = ["--vocab-file", str(byte_level / "vocab.json"), "--merge-file", str(byte_level / "merges.txt")]
        return ["--tokenizer-type", "GPT2BPETokenizer", *files]
    spelt = sorted(tokenizer.get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [_bytes_of(text) for text, _ in spelt if len(text) > 1 and text != "<|endoftext|>"]
    entries = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode(errors="replace")}
        for rank, token in enumerate(tokens)
    ]
    model = folder / "tiktoken.json"
    model.write_text(json.dumps(entries))
    size = ["--vocab-size", str(len(tokens) + 1000)]
    return ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(model), *size]


def _bytes_of(text: str) -> bytes:
    """Return the bytes that a token of a byte-level vocabulary stands for (GPT-2's table of one character for each
    byte)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    table |= {chr(256 + number): byte for number, byte in enumerate(others)}
    return bytes(table[character] for character in text)


def run(command: str, options: argparse.Namespace, corpus: Path, flags: list[str]) -> tuple[Measured, str]:
    """Run one command once; the second value returned is the hash of its output."""
    prefix = options.folder / command
    tool = [sys.executable, str(ROOT / "tools" / "preprocess_data.py")]
    environment = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    if command == "plain":
        tool.append("--plain-tokenizer")
    elif command == "peer":
        tool = [options.peer_python, str(options.peer / "tools" / "preprocess_data.py")]
        environment["PYTHONPATH"] = str(options.peer)
    common = ["--input", str(corpus), "--append-eod", "--workers", "1", "--log-interval", "1000000"]
    measured = measure([*tool, *common, *flags, "--output-prefix", str(prefix)], environment=environment)
    if measured.exit_code != 0:
        sys.exit(f"{command} {' '.join(flags)}\n{measured.output}\nexit code {measured.exit_code}")
    digest = hashlib.sha256()
    for suffix in (".bin", ".idx"):
        digest.update(Path(f"{prefix}_text_document{suffix}").read_bytes())
    return measured, digest.hexdigest()


def machine(peer_commit: str | None) -> dict[str, Any]:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "commit": commit or None,
        "peer_commit": peer_commit,
    }


def row(measured: Measured, megabytes: float, digest: str) -> dict[str, Any]:
    return {
        **{name: round(value, 2) for name, value in dataclasses.asdict(measured).items() if isinstance(value, float)},
        "megabytes_per_second": round(megabytes / measured.seconds, 2),
        "megabytes_per_processor_second": round(megabytes / measured.processor_seconds, 2),
        "peak_bytes": measured.peak_bytes,
        "sha256": digest,
    }


def report(record: dict[str, Any]) -> str:
    """Return the record as Markdown."""
    about, corpus = record["machine"], record["corpus"]
    peer = f" The peer is Megatron-LM {about['peer_commit']}." if about["peer_commit"] else ""
    lines = [
        f"# Preprocessing on one core, {record['date']}",
        "",
        f"{about['cpu']}, {about['cores']} cores, load average {about['load_average']} before the start, Python "
        f"{about['python']}, commit {about['commit']}.{peer} {corpus['bytes'] / 1e6:.1f} MB of JSON lines, "
        f"{corpus['documents']} documents, {corpus['empty_documents']} of them empty, "
        f"{corpus['share_of_bytes_unrepeated']:.0%} of the bytes in documents that are there once. One worker, "
        "--append-eod, cold process, the whole command.",
        "",
        "| tokenizer | command | s | MB/s | processor s | MB/s of a core | peak MB | output | times the peer, by s | "
        "by processor s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, rows in record["tokenizers"].items():
        theirs = rows.get("peer")
        for name, one in rows.items():
            ratios = ["", ""]
            if theirs is not None and name != "peer":
                ratios = [f"{theirs[key] / one[key]:.1f}" for key in ("seconds", "processor_seconds")]
            lines.append(
                f"| {kind} | {name} | {one['seconds']} | {one['megabytes_per_second']} | {one['processor_seconds']} | "
                f"{one['megabytes_per_processor_second']} | {one['peak_bytes'] / 1e6:.0f} | {one['sha256'][:12]} | "
                f"{' | '.join(ratios)} |"
            )
    return "\n".join(lines) + "\n"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="folder for the corpus, the tokenizers and the outputs")
    add("--corpus", type=Path, help="JSON lines to use instead of making a corpus")
    add("--megabytes", type=int, default=220, help="size of the corpus that is made")
    add("--tokenizers", nargs="+", default=["huggingface"], metavar="KIND", help="kinds of tokenizers", choices=(
        "huggingface", "gpt2", "sentencepiece-bpe", "sentencepiece-unigram", "tiktoken"))  # fmt: skip
    add("--commands", nargs="+", default=list(COMMANDS), choices=COMMANDS, help="peer only with --peer")
    add("--repeats", type=int, default=3, help="runs of each of our commands; the peer runs once")
    add("--peer", type=Path, help="a checkout of Megatron-LM")
    add("--peer-commit", help="its commit; default what git says")
    add("--peer-python", default=sys.executable, help="Python with the peer's requirements (torch, transformers)")
    add("--output", type=Path, help="folder for the .json and .md of this run")
    return parser


def main() -> None:
    options = make_parser().parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    corpus = options.corpus or options.folder / "corpus.jsonl"
    if not corpus.exists():
        make_corpus(corpus, options.megabytes)
    commit = options.peer_commit
    if options.peer is not None and commit is None:
        found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=options.peer, capture_output=True, text=True)
        commit = found.stdout.strip() or None
    record = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": machine(commit),
        "corpus": describe_corpus(corpus),
        "tokenizers": {},
    }
    megabytes = corpus.stat().st_size / 1e6
    for kind in options.tokenizers:
        flags = tokenizer_flags(kind, options.folder, corpus)
        rows = record["tokenizers"][kind] = {}
        for command in options.commands:
            if command == "peer" and options.peer is None:
                continue
            runs = [run(command, options, corpus, flags) for _ in range(1 if command == "peer" else options.repeats)]
            best, digest = min(runs, key=lambda one: one[0].processor_seconds)
            rows[command] = row(best, megabytes, digest)
            print(kind, command, json.dumps(rows[command]), flush=True)
    print(report(record))
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        stem = options.output / f"preprocess-{'-'.join(options.tokenizers)}-{record['date']}"
        stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
        stem.with_suffix(".md").write_text(report(record))


if __name__ == "__main__":
    main()
