"""Files of an untrusted folder: only files that lie in it are opened. No torch here.

    path = file_inside(checkpoint, "__0_0.distcp")    # named by the checkpoint's own content
    check_folder(checkpoint)                          # before the engine, which opens files by itself

A name may lead to a pipe, which would be waited for without end, or through a link to any file of the machine.
"""

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from megatron_ext.errors import DataError

# ENAMETOOLONG is what the content of a hostile index leads to, ELOOP a link to itself.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)


def file_inside(folder: Path, name: str, *, also: Sequence[Path] = (), nested: bool = False) -> Path:
    """Return the path of a file of the folder, which its own content names.

    Args:
        also: further folders into which a link may lead.
        nested: whether the name may lead into folders of the folder, as `tokenizer/vocab.json`.
    Raises:
        DataError: the name or a link leads out of the folder, or there is no such file.
    """
    if not is_plain(name, nested=nested):
        raise DataError(f"{folder}: {ascii(name)[:200]} is not the plain name of a file beside it; nothing was read")
    path = folder / name
    kind = _kind(path)
    if kind is None:
        raise DataError(f"{path} is missing")
    if nested or path.is_symlink():
        _check_links(folder, path, also)
    if not stat.S_ISREG(kind):
        raise DataError(f"{path} is no file but {_word(kind)}; nothing was read")
    return path


def is_plain(name: object, *, nested: bool = False) -> bool:
    """Return whether this is the name of a file in a folder, and not a path to somewhere else."""
    if not isinstance(name, str) or "\0" in name or not name:
        return False
    parts = PurePosixPath(name).parts
    return "/".join(parts) == name and ".." not in parts and parts[0] != "/" and (nested or len(parts) == 1)


def check_folder(folder: Path) -> None:
    """Check that everything in a checkpoint is a file, a folder, or a link to a file or folder in the checkpoint.

    Raises:
        DataError: it has anything else; the error names the first.
        OSError: the folder cannot be read.
    """
    left = [folder]
    while left:
        with os.scandir(left.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    left.append(Path(entry.path))
                elif not entry.is_file(follow_symlinks=False):
                    _check_special(folder, Path(entry.path))


def _check_special(folder: Path, path: Path) -> None:
    """Check an entry that is neither file nor folder: a link inside of the folder is accepted; a link to nothing counts
    as a missing file."""
    if path.is_symlink():
        _check_links(folder, path, ())
    kind = _kind(path)
    if kind is not None and not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise DataError(f"{path} is no file but {_word(kind)}; nothing was read")


def read_inside(folder: Path, name: str, most: int) -> bytes:
    """Return the content of a small file.

    Raises:
        DataError: as `file_inside`, or the file has more than `most` bytes.
        OSError: the file cannot be read.
    """
    with file_inside(folder, name).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DataError(f"{folder / name} is larger than {most:,} bytes; nothing of it was used")
    return content


def _check_links(folder: Path, path: Path, also: Sequence[Path]) -> None:
    home, target = folder.resolve(), path.resolve()
    if not (target.is_relative_to(home) or target.parent in also):
        raise DataError(f"{path} is a link to {target}, out of its folder; nothing was read. Put a copy in its place")


def _kind(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise


def _word(kind: int) -> str:
    words = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return words.get(stat.S_IFMT(kind), "a device")
