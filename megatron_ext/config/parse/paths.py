"""Checks every path that a flag names, before anything follows it: one that no file can have, or that leads to a pipe,
for which its reader or writer would wait without end."""

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_ext.config.parse.blend import DATA_PATH_NAMES, is_url, read_blend
from megatron_ext.config.parse.options import flag_of
from megatron_ext.errors import StorageError

_READ = (
    *("load", "load_hf", "data_args_path", "per_split_data_args_path", "tokenizer_model", "vocab_file", "merge_file"),
    *("eval_tasks", "sample_prompts"),
)
_FOLDERS = ("save", "tensorboard_dir", "wandb_save_dir", "data_cache_path", "non_persistent_local_ckpt_dir")
_FILES = ("metrics_file", "log_sample_ids", "memory_snapshot_path")
# What a run appends to, or replaces after it has read it, in the folder of --save.
_IN_SAVE = ("metrics.jsonl", "latest_checkpointed_iteration.txt")


def path_problems(values: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the paths of the typed values, each with its flag; whether they exist is not asked.

    Raises:
        StorageError: the machine does not let this process look at one of them.
    """
    return [problem for flag, path, is_file in _paths(values) if (problem := _problem(flag, path, is_file=is_file))]


def _paths(values: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Yield flag, path, and whether a file is written there."""
    for name in (*_READ, *_FOLDERS, *_FILES):
        path = values.get(name)
        if isinstance(path, str) and not is_url(path):
            yield flag_of(name), path, name in _FILES
    for name in DATA_PATH_NAMES:
        try:
            prefixes = read_blend(values.get(name) or ()).prefixes
        except ValueError:
            continue  # the rules say what is wrong with it
        yield from ((flag_of(name), f"{prefix}.bin", False) for prefix in prefixes if not is_url(prefix))
    if isinstance(save := values.get("save"), str) and os.path.isdir(save):
        yield from (("--save", str(Path(save, name)), True) for name in _IN_SAVE)


def _problem(flag: str, path: str, *, is_file: bool) -> str | None:
    named = f"{flag} {ascii(path)[1:-1][:200]}"
    try:
        kind = os.stat(path).st_mode
        if flag == "--load" and stat.S_ISDIR(kind):
            os.scandir(path).close()
    except PermissionError as error:
        raise StorageError(f"{named}: {error.strerror}. Fix the permission, or give another path.") from error
    except OSError as error:
        # A missing one is made, or named by the rules; of a --save below a file its lock says that it cannot be made.
        if error.errno == errno.ENOENT or (flag == "--save" and error.errno == errno.ENOTDIR):
            return None
        return f"{named}: {error.strerror}; give another path"
    except ValueError as error:  # a NUL, which YAML can hold
        return f"{named}: {error}; give another path"
    if is_file and not (stat.S_ISREG(kind) or stat.S_ISCHR(kind)):
        what = "a folder" if stat.S_ISDIR(kind) else "no file, but a pipe, a socket or a device"
        return f"{named} is {what}, and a file is to be written there; remove it, or give another path"
    return None
