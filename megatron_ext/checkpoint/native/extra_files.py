"""Writes the files of a checkpoint next to the tensors, so that it is of use where nothing else of the run is left.
This needs no torch.

    iter_0000010/tokenizer/        the tokenizer's files, under Hugging Face's names where there are such
    iter_0000010/versions.json     of the software that wrote it
"""

import json
import platform
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import megatron_ext
from megatron_ext.config.schema import DataConfig
from megatron_ext.untrusted.text import load_json, read_file
from megatron_ext.untrusted.values import mapping, text

TOKENIZER = "tokenizer"
VERSIONS = "versions.json"

HUGGINGFACE_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
# Field of the flags -> name of the copy, by the type of the tokenizer. A folder's files keep their names.
_SINGLE_FILES = {
    "SentencePieceTokenizer": {"tokenizer_model": "tokenizer.model"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "TikTokenizer": {"tokenizer_model": "tiktoken.json"},
}


def keep_tokenizer(data: DataConfig, checkpoint: Path, earlier: Iterable[Path]) -> None:
    """Copy the tokenizer's files into `checkpoint`; where they are gone, from the first of `earlier` that has them.

    Raises:
        OSError: the checkpoint cannot be written.
    """
    sources = tokenizer_files(data)
    if sources and not all(path.is_file() for path in sources.values()):
        folders = [folder / TOKENIZER for folder in earlier]
        kept = next((folder for folder in folders if folder.is_dir() and not folder.is_symlink()), None)
        sources = {path.name: path for path in kept.iterdir() if _is_kept(path)} if kept else {}
    for name, path in sources.items():
        (checkpoint / TOKENIZER).mkdir(exist_ok=True)
        shutil.copyfile(path, checkpoint / TOKENIZER / name)


def tokenizer_files(data: DataConfig) -> dict[str, Path]:
    """Return name of the copy -> file of the tokenizer, whether the file exists or not."""
    if data.tokenizer_type == "HuggingFaceTokenizer" and data.tokenizer_model is not None:
        folder = Path(data.tokenizer_model)
        files = {name: folder / name for name in HUGGINGFACE_FILES if (folder / name).is_file()}
        return files or {"tokenizer.json": folder / "tokenizer.json"}
    names = _SINGLE_FILES.get(data.tokenizer_type or "", {})
    return {name: Path(value) for field, name in names.items() if (value := getattr(data, field)) is not None}


def kept_tokenizer(values: Mapping[str, Any], checkpoint: Path) -> dict[str, str]:
    """Return the copies in `checkpoint` by the flag that names such a file; only copies that exist."""
    folder = checkpoint / TOKENIZER
    if folder.is_symlink():
        return {}
    kind = values.get("tokenizer_type")
    if kind == "HuggingFaceTokenizer":
        return {"tokenizer_model": str(folder)} if _is_kept(folder / "tokenizer.json") else {}
    names = _SINGLE_FILES.get(kind or "", {})
    return {field: str(folder / name) for field, name in names.items() if _is_kept(folder / name)}


def _is_kept(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def write_versions(checkpoint: Path) -> None:
    """Write the versions of this program, of Python, and of the packages that the saved files depend on."""
    (checkpoint / VERSIONS).write_text(json.dumps(_installed(), indent=1) + "\n", encoding="utf-8")


def _installed() -> dict[str, str]:
    from importlib import metadata  # with it comes a parser of e-mails, which a plan or --help need not wait for

    packages = {name: metadata.version(name) for name in ("torch", "megatron-core", "numpy")}
    return {"megatron_ext": megatron_ext.__version__, "python": platform.python_version(), **packages}


_MAY_DIFFER = {
    "megatron_ext": "CHANGELOG.md of this program says what has changed",
    "torch": "torch's kernels may round otherwise, so that losses agree but for rounding",
    "megatron-core": "megatron-core's schedules and optimizers may round otherwise",
}
"""Software whose version matters to a run that goes on -> what another version may change."""


def other_versions(checkpoint: Path) -> str | None:
    """Return one line about the versions that wrote a checkpoint, where they are not the installed ones, and about what
    may differ; None where they are, or where the file cannot be read."""
    try:
        saved = load_json(read_file(checkpoint / VERSIONS, 1 << 16))
        _VERSIONS(saved)
    except (OSError, ValueError):
        return None
    here = _installed()
    changed = [name for name in _MAY_DIFFER if name in saved and saved[name] != here[name]]
    if not changed:
        return None
    versions = ", ".join(f"{name} {saved[name]} (here {here[name]})" for name in changed)
    return f"{checkpoint} was written with {versions}: {'; '.join(_MAY_DIFFER[name] for name in changed)}"


_VERSIONS = mapping(text(200))
