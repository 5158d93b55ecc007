"""Runs layouts with the program of one commit, and writes down what must not change: run by path, in its own process.

    cd SCRATCH && PYTHONPATH=TREE python run.py TREE JOBS.json RESULTS.jsonl WORKERS

TREE is a checkout. The modules inside it differ from commit to commit, so only what stays is used: the command lines
of pretrain_gpt.py and tools/convert_checkpoint.py, the files that they write, and `run_ranks`. For the
same reason nothing else of megatron_ext is imported here. All paths in flags are relative to SCRATCH, so that the
files of two commits can be equal to the byte.

RESULTS gets one line for each job: {"name", "stages": {stage: {"rows", "tensors", "files"}}} or {"name", "failed"}.
"""

import hashlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

VERSION = 1
"""Version of the results. Raise it when what is run or written down changes, so that kept results are not compared with
others."""

_PRELOAD = (
    "megatron_ext.forkserver.preload",
    "megatron_ext.verify.preload",  # of commits before the core was divided from its plugins, as below
    "megatron_ext.train.pretrain",
    "megatron_ext.plugins.huggingface.exporter",
)

_TIMEOUT = 1800.0  # seconds of a stage, which takes a few: the machine may be busy


def main(tree: str, jobs: str, results: str, workers: str) -> None:
    """Run all jobs, `workers` of them at a time, and append each result as soon as it is there."""
    _start_server()
    lock = threading.Lock()
    with open(results, "a", encoding="utf-8") as output, ThreadPoolExecutor(int(workers)) as pool:

        def run_one(job: dict[str, Any]) -> None:
            line = json.dumps(run_job(tree, job))
            with lock:
                output.write(line + "\n")
                output.flush()

        list(pool.map(run_one, json.loads(Path(jobs).read_text())))


def _start_server() -> None:
    """Start the server that ranks are forked from, with what every rank imports anyway; an unknown module is no harm.

    `run_ranks` names a shorter list, which a server that is already there does not read.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(_PRELOAD))
    multiprocessing.forkserver.ensure_running()


def run_job(tree: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Run the stages of one layout in the order they are in; the first that fails ends it, with the end of its log."""
    folder, started = Path(job["folder"]), time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    stages = {}
    try:
        for stage in job["stages"]:
            log = folder / f"{stage['name']}.log"
            try:
                _start(tree, stage, log)
            except Exception as error:  # a rank's death, or what it raised
                text = log.read_text(errors="replace")[-3000:] if log.exists() else ""
                return {"name": job["name"], "failed": f"{stage['name']}: {error}\n{text}".strip()}
            stages[stage["name"]] = _written(folder / stage["name"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"name": job["name"], "seconds": round(time.monotonic() - started, 1), "stages": stages}


def _start(tree: str, stage: Mapping[str, Any], log: Path) -> None:
    try:
        from megatron_ext.forkserver.ranks import run_ranks
    except ImportError:
        from megatron_ext.verify.ranks import run_ranks  # pyright: ignore[reportMissingImports]

    script = os.path.join(tree, stage["script"])
    run_ranks(stage["ranks"], run_script, script, stage["words"], str(log), timeout=_TIMEOUT)


def run_script(script: str, words: Sequence[str], log: str) -> None:
    """Run a script of the commit on this rank as from a shell; its output goes to the end of `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.argv = [script, *words]
    sys.path.insert(0, os.path.dirname(script))  # as for a script that a shell starts
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code not in (0, None):
            raise RuntimeError(f"{os.path.basename(script)} ended with exit code {end.code}") from end


def _written(folder: Path) -> dict[str, Any]:
    """Return what a stage left behind: the rows of its metrics, the tensors of its checkpoints, and all files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    metrics = folder / "metrics.jsonl"
    checkpoints = sorted(path.parent for path in paths if path.name == ".metadata")
    return {
        "rows": [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else [],
        "tensors": {
            f"{path.relative_to(folder)}: {name}": text for path in checkpoints for name, text in tensor_hashes(path)
        },
        "files": {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in paths
            if path != metrics
        },
    }


def tensor_hashes(checkpoint: Path) -> Iterator[tuple[str, str]]:
    """Yield (global name, SHA-256) of everything in a torch_dist checkpoint, in the order of the names.

    The checkpoint is read by torch alone, so that how the shards are laid out in files does not count. The checkpoint
    was written by this process's own ranks; pickles in it are trusted.
    """
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state: dict[str, Any] = {}
    reader = FileSystemReader(checkpoint)
    _load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    for name in sorted(state, key=str):
        digest = hashlib.sha256()
        _add(digest, state[name])
        yield str(name), digest.hexdigest()


def _add(digest: Any, value: Any) -> None:
    """Hash a value by its content: no class paths, no order of keys."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        bits = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode() + bits)
    elif isinstance(value, np.ndarray):
        digest.update(f"array {value.dtype} {value.shape} ".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)} ".encode())
        for key in sorted(value, key=repr):
            digest.update(repr(key).encode())
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)} ".encode())
        for item in value:
            _add(digest, item)
    elif hasattr(value, "getvalue"):  # bytes that torch left as they were
        digest.update(value.getvalue())
    elif isinstance(value, float):
        digest.update(value.hex().encode())
    elif hasattr(value, "__dict__"):
        _add(digest, vars(value))
    else:
        digest.update(repr(value).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
