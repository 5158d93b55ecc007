"""Writes a corpus of real text that every machine has: the Python standard library's sources, some 30 MB.

    python tools/python_corpus.py --output-prefix data/python

writes data/python_train.jsonl and data/python_valid.jsonl, one object {"text", "path"} for each file. A file's split
depends on its path alone, the order is sorted: the same interpreter always gives the same corpus. So does the same
version of a package that is installed, which is not imported:

    python tools/python_corpus.py --output-prefix data/models \\
        --package transformers --files "models/*/modeling_*.py" --without-header

takes 24 MB of PyTorch models, all written in one style, without the licence that each begins with.
"""

import hashlib
import importlib.util
import json
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import ConfigurationError

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


def root_of(package: str | None) -> Path:
    """Return the folder of an installed package, which is not imported; of the standard library for None.

    Raises:
        ConfigurationError: it is not installed, or is no folder of sources.
    """
    if package is None:
        return Path(sysconfig.get_paths()["stdlib"])
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise ConfigurationError(f"--package {package} is not installed, or is one file; name a package of this Python")
    return Path(found.submodule_search_locations[0])


def without_header(text: str) -> str:
    """Return a source without the comment and empty lines that it begins with."""
    return re.sub(r"\A(?:[ \t]*(?:#[^\n]*)?\n)+", "", text)


def library_files(library: Path, pattern: str) -> Iterator[tuple[str, str]]:
    """Yield (path below `library`, text) of its files of that pattern, sorted by path; files that are not UTF-8 are
    left out."""
    files = (file.relative_to(library) for file in library.glob(pattern) if file.is_file())
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
    parser = ToolParser(
        "Write Python sources, the standard library's or a package's, as a training and a validation .jsonl file."
    )
    parser.add_argument(
        "--output-prefix", required=True, help="the files get this name plus _train.jsonl, _valid.jsonl"
    )
    parser.add_argument("--validation-share", type=float, default=0.03, help="share of the files kept for validation")
    parser.add_argument("--package", metavar="NAME", help="an installed package; default the standard library")
    parser.add_argument("--files", default="**/*.py", metavar="PATTERN", help="of the files, below its folder")
    parser.add_argument("--without-header", action="store_true", help="leave out the comment that a file begins with")
    options = parser.parse_args(argv)
    if not 0 < options.validation_share < 1:
        raise ConfigurationError(f"--validation-share {options.validation_share} must lie between 0 and 1")
    library = root_of(options.package)
    folder = Path(options.output_prefix).parent
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"train": [0, 0], "valid": [0, 0]}
    train, valid = (Path(f"{options.output_prefix}_{split}.jsonl") for split in counts)
    with open(train, "w", encoding="utf-8") as train_file, open(valid, "w", encoding="utf-8") as valid_file:
        for path, text in library_files(library, options.files):
            split, file = (
                ("valid", valid_file) if is_validation(path, options.validation_share) else ("train", train_file)
            )
            text = without_header(text) if options.without_header else text
            file.write(json.dumps({"text": text, "path": path}) + "\n")
            counts[split][0] += 1
            counts[split][1] += len(text)
    for split, (files, characters) in counts.items():
        print(f"{options.output_prefix}_{split}.jsonl: {files} files, {characters / 1e6:.1f} M characters")
    return 0


if __name__ == "__main__":
    run_tool(main)
