"""Writes a corpus of real text that every machine has: the Python standard library's sources, some 30 MB.

    python tools/python_corpus.py --output-prefix data/python

writes data/python_train.jsonl and data/python_valid.jsonl, one object {"text", "path"} for each file. A file's split
depends on its path alone, the order is sorted: the same interpreter always gives the same corpus.
"""

import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import ConfigurationError

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


def library_files(library: Path) -> Iterator[tuple[str, str]]:
    """Yield (path below `library`, text) of its .py files, sorted by path; files that are not UTF-8 are left out."""
    files = (file.relative_to(library) for file in library.rglob("*.py") if file.is_file())
    for path in sorted(path.as_posix() for path in files if not _NOT_THE_LIBRARY & set(path.parts)):
        try:
            yield path, (library / path).read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue


def is_validation(path: str, share: float) -> bool:
    """Return whether a file is validation data: a hash of its path, below `share` of all hashes."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big") < share * 2**64


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    parser = ToolParser("Write the standard library's sources as a training and a validation .jsonl file.")
    parser.add_argument(
        "--output-prefix", required=True, help="the files get this name plus _train.jsonl, _valid.jsonl"
    )
    parser.add_argument("--validation-share", type=float, default=0.03, help="share of the files kept for validation")
    options = parser.parse_args(argv)
    if not 0 < options.validation_share < 1:
        raise ConfigurationError(f"--validation-share {options.validation_share} must lie between 0 and 1")
    folder = Path(options.output_prefix).parent
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"train": [0, 0], "valid": [0, 0]}
    train, valid = (Path(f"{options.output_prefix}_{split}.jsonl") for split in counts)
    with open(train, "w", encoding="utf-8") as train_file, open(valid, "w", encoding="utf-8") as valid_file:
        for path, text in library_files(Path(sysconfig.get_paths()["stdlib"])):
            split, file = (
                ("valid", valid_file) if is_validation(path, options.validation_share) else ("train", train_file)
            )
            file.write(json.dumps({"text": text, "path": path}) + "\n")
            counts[split][0] += 1
            counts[split][1] += len(text)
    for split, (files, characters) in counts.items():
        print(f"{options.output_prefix}_{split}.jsonl: {files} files, {characters / 1e6:.1f} M characters")
    return 0


if __name__ == "__main__":
    run_tool(main)
