"""Checks every path that a flag names, before anything follows it: one that no file can have, or that leads to a pipe,
for which its reader or writer would wait without end."""

import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from megatron_ext.config.parse.blend import DATA_PATH_NAMES, is_url, read_blend
from megatron_ext.config.parse.options import flag_of
from megatron_ext.errors import StorageError

Use = Literal["read", "folder", "written"]
"""Use of a path: a file or folder that is read, a folder in which files are written, or a file that is written."""

_READ = (
    *("load", "load_hf", "data_args_path", "per_split_data_args_path", "tokenizer_model", "vocab_file", "merge_file"),
    *("eval_tasks", "sample_prompts", "stages"),
)
_FOLDERS = ("save", "tensorboard_dir", "wandb_save_dir", "data_cache_path", "non_persistent_local_ckpt_dir")
_FILES = ("metrics_file", "log_sample_ids", "memory_snapshot_path")
# Files in the folder of --save that a run appends to, or replaces after it has read them.
_IN_SAVE = ("metrics.jsonl", "latest_checkpointed_iteration.txt")


def path_problems(values: Mapping[str, Any]) -> list[str]:
    """Return the problems of the paths in the typed values, each with its flag; a missing path is no problem.

    Raises:
        StorageError: the machine does not let this process look at one of them.
    """
    return [problem for flag, path, use in _paths(values) if (problem := path_problem(flag, path, use))]


def _paths(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Use]]:
    uses: tuple[tuple[tuple[str, ...], Use], ...] = ((_READ, "read"), (_FOLDERS, "folder"), (_FILES, "written"))
    for names, use in uses:
        for name in names:
            path = values.get(name)
            if isinstance(path, str) and not is_url(path):
                yield flag_of(name), path, use
    for word in values.get("skip_samples") or ():
        if not re.fullmatch(r"[\d-]+", word):  # a number or a range
            yield "--skip-samples", word, "read"
    for name in DATA_PATH_NAMES:
        try:
            prefixes = read_blend(values.get(name) or ()).prefixes
        except ValueError:
            continue  # the rules say what is wrong with it
        for prefix in prefixes:
            if not is_url(prefix):
                yield flag_of(name), f"{prefix}.bin", "read"
    if isinstance(save := values.get("save"), str) and os.path.isdir(save):
        for name in _IN_SAVE:
            yield "--save", str(Path(save, name)), "written"


def path_problem(flag: str, path: str, use: Use) -> str | None:
    """Return the problem of a path, with its flag; None if it has none, or does not exist.

    Raises:
        StorageError: this process may not look at the path, or not read a file that it is to read.
    """
    named = f"{flag} {ascii(path)[1:-1][:200]}"
    try:
        kind = os.stat(path).st_mode
        if use == "read" and not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except PermissionError as error:
        raise StorageError(f"{named}: {error.strerror}. Fix the permission, or give another path.") from error
    except OSError as error:
        # A missing one is made, or named by the rules; of a --save below a file its lock says that it cannot be made.
        if error.errno == errno.ENOENT or (flag == "--save" and error.errno == errno.ENOTDIR):
            return None
        return f"{named}: {error.strerror}; give another path"
    except ValueError as error:  # a NUL, which YAML can hold
        return f"{named}: {error}; give another path"
    what = "a folder" if stat.S_ISDIR(kind) else "no file, but a pipe, a socket or a device"
    if use == "written" and not (stat.S_ISREG(kind) or stat.S_ISCHR(kind)):
        return f"{named} is {what}, and a file is to be written there; remove it, or give another path"
    if use == "read" and (stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
        # Not even `<(...)`: what a flag names is read more than once, and a pipe is empty the second time.
        return f"{named} is {what}, and a file is to be read there; give another path"
    if use == "folder" and flag != "--save" and not stat.S_ISDIR(kind):  # --save says it with its lock
        return f"{named} is no folder, and files are to be written in it; remove it, or give another path"
    return None
