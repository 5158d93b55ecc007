"""Writes and reads the size and checksum of every file of a checkpoint; the manifest is written last into its folder.
This needs no torch.

    {"checksum": "crc32", "files": {".metadata": {"bytes": 42323, "crc32": "6fa1..."}, ...}, "own_crc32": "..."}

CRC-32 finds every change of up to four neighbouring bytes and all but 1 in 4 billion of others. It guards against
disks and networks, not against people. It is the fastest in Python's own library: a few GB/s on one core.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.native.extra_files import VERSIONS
from megatron_ext.errors import DataError
from megatron_ext.untrusted.text import load_json
from megatron_ext.untrusted.untrusted_folder import file_inside, is_plain, read_inside

MANIFEST = "manifest.json"

Files = dict[str, dict[str, Any]]
"""Size in bytes and checksum, by the file's path in the checkpoint folder."""

_CHUNK = 1 << 24
_LARGEST = 1 << 28  # bytes


def describe(folder: Path, paths: Iterable[Path]) -> Files:
    """Read files of `folder` whole, for the manifest.

    Raises:
        OSError: one of them cannot be read.
    """
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "crc32": checksum(path)} for path in paths
    }


def all_files(folder: Path) -> list[Path]:
    """Return all files of a checkpoint, those in its folders too."""
    return [path for path in folder.rglob("*") if path.is_file()]


def checksum(path: Path) -> str:
    """Return the CRC-32 of the content, as eight hexadecimal digits."""
    value = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            value = zlib.crc32(chunk, value)
    return f"{value:08x}"


def write(folder: Path, files: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint."""
    (folder / MANIFEST).write_text(_render(files), encoding="utf-8")


def name_of(folder: Path) -> str | None:
    """Return a hash of the manifest, which differs from the one of another checkpoint saved in the same place; None
    without a manifest."""
    try:
        content = read_inside(folder, MANIFEST, _LARGEST)
    except (OSError, ValueError, DataError):
        return None
    return hashlib.sha256(content).hexdigest()[:16]


def read(folder: Path) -> Files | None:
    """Return the manifest of a checkpoint; None where it has none (one that Megatron-LM wrote).

    Raises:
        ValueError: the manifest is damaged, no file of the folder, or names what is none; or it is missing from a
            checkpoint that this program wrote.
        OSError: the manifest cannot be read.
    """
    if not os.path.lexists(folder / MANIFEST):
        if os.path.lexists(folder / VERSIONS):
            raise ValueError(f"{MANIFEST} is missing")
        return None
    try:
        content = read_inside(folder, MANIFEST, _LARGEST)
    except DataError as error:
        raise ValueError(str(error)) from None
    try:
        files = load_json(content)["files"]
        intact = _render(files).encode() == content
    except (ValueError, KeyError, TypeError):
        intact, files = False, {}
    if not intact:
        raise ValueError(f"{MANIFEST} is damaged")
    for name, entry in files.items():
        if not is_plain(name, nested=True):
            raise ValueError(f"{MANIFEST} names {ascii(name)[:200]}, which is no file of the checkpoint")
        if not _is_entry(entry):
            raise ValueError(f"{MANIFEST} has no size and checksum of {ascii(name)[:200]}")
    return files


def problems(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the problems of these files, each with the file's name; empty where they agree with the manifest."""
    reasons = []
    for name, entry in files.items():
        path = folder / name
        if not os.path.lexists(path):
            reasons.append(f"{name} is missing")
            continue
        try:
            size = file_inside(folder, name, nested=True).stat().st_size
            if size != entry["bytes"]:
                reasons.append(f"{name} has {size} bytes instead of {entry['bytes']}")
            elif checksum(path) != entry["crc32"]:
                reasons.append(f"{name} has another checksum than {entry['crc32']}")
        except DataError as error:
            reasons.append(f"{name}: {error}")
        except OSError as error:
            reasons.append(f"{name} cannot be read: {error.strerror}")
    return reasons


def _is_entry(entry: Any) -> bool:
    if type(entry) is not dict or entry.keys() != {"bytes", "crc32"}:
        return False
    return type(entry["bytes"]) is int and entry["bytes"] >= 0 and type(entry["crc32"]) is str


def _render(files: Mapping[str, Any]) -> str:
    body = json.dumps({name: files[name] for name in sorted(files)}, indent=1)
    return f'{{"checksum": "crc32", "files": {body}, "own_crc32": "{zlib.crc32(body.encode()):08x}"}}\n'
