"""Gets results of layouts, by commit: checked out, run in a process of its own, and kept for the next time.

with scratch_folder() as scratch:
    for name, result in results(commit, layouts.chosen("quick"), scratch, cache=None, workers=2):
        ...
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from megatron_ext.errors import ConfigurationError
from tests.support.losses import layouts, run

ROOT = Path(__file__).resolve().parents[3]
Job = dict[str, Any]
Result = dict[str, Any]
_VARIABLES_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def results(
    commit: str | None, jobs: Mapping[str, Job], scratch: Path, cache: Path | None, workers: int
) -> Iterator[tuple[str, Result]]:
    """Yield the name and result of every job: first those in the cache, then those that are run, as they end.

    Args:
        commit: full hash, or None for the working tree as it is, whose results are never kept.
        jobs: from `layouts`, by name.
        scratch: from `scratch_folder`.
        cache: folder of kept results.
        workers: how many jobs run at a time.
    """
    left = {}
    for name, job in jobs.items():
        path = _kept(cache, commit, job)
        if path is not None and path.exists():
            yield name, json.loads(path.read_text())
        else:
            left[name] = job
    if not left:
        return
    with _tree(commit, scratch) as tree:
        for result in run_jobs(tree, list(left.values()), scratch, workers):
            path = _kept(cache, commit, left[result["name"]])
            if path is not None and "failed" not in result:
                _keep(path, result)
            yield result["name"], result


def run_jobs(
    tree: Path, jobs: list[Job], scratch: Path, workers: int, python: str = sys.executable
) -> Iterator[Result]:
    """Run jobs with the code in `tree`, in one process of `python` that forks their ranks, and yield the results as
    they come.

    A process that ends early fails the jobs that it leaves.
    """
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        asked, answers, log = Path(own) / "jobs.json", Path(own) / "results.jsonl", Path(own) / "log"
        asked.write_text(json.dumps(jobs))
        answers.touch()
        environment = {name: value for name, value in os.environ.items() if name not in _VARIABLES_OF_A_LAUNCHER}
        environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        command = [python, "-P", run.__file__, str(tree), str(asked), str(answers), str(workers)]
        with log.open("wb") as output, answers.open() as lines:
            process = subprocess.Popen(
                command, cwd=scratch, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            left = [job["name"] for job in jobs]
            try:
                for result in _follow(lines, process):
                    left.remove(result["name"])
                    yield result
            finally:
                _end(process)
        said = log.read_text(errors="replace")[-3000:]
        yield from ({"name": name, "failed": f"the process of all runs, which ended early:\n{said}"} for name in left)


def _follow(lines: IO[str], process: subprocess.Popen[bytes]) -> Iterator[Result]:
    """Yield every line that the process appends, until it ends."""
    partial = ""
    while True:
        ended = process.poll() is not None
        for piece in lines:
            partial += piece
            if partial.endswith("\n"):
                yield json.loads(partial)
                partial = ""
        if ended:
            return
        time.sleep(0.1)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of the process and its ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@functools.cache
def cpu_kind() -> str:
    """Return the CPU's vendor and model, and the vector instructions that torch uses on it: others give other bits."""
    import torch

    return f"{_cpu_model()}, {torch.backends.cpu.get_cpu_capability()}"


def _cpu_model() -> str:
    """Return the CPU's model as Linux tells it of the first core, elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    told = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    numbers = (f"{name} {told[name]}" for name in ("cpu family", "model") if name in told)
    return " ".join([told.get("vendor_id", platform.machine()), *numbers])


def _kept(cache: Path | None, commit: str | None, job: Job) -> Path | None:
    """Return where a result is kept: it follows from the commit, the job and its data, torch, megatron-core and the
    CPU."""
    if cache is None or commit is None:
        return None
    key = json.dumps([run.VERSION, layouts.corpus_hash(), job, version("torch"), version("megatron-core"), cpu_kind()])
    return cache / commit / f"{layouts.slug(job['name'])}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def _keep(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(result))
    temporary.replace(path)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Make a temporary folder with the data that all layouts read."""
    with tempfile.TemporaryDirectory(prefix="loss_compare_") as name:
        folder = Path(name).resolve()
        layouts.write_corpus(folder / "data")
        yield folder


@contextlib.contextmanager
def _tree(commit: str | None, scratch: Path) -> Iterator[Path]:
    """A checkout of a commit, removed at the end; None is the working tree."""
    if commit is None:
        yield ROOT
        return
    tree = scratch / f"tree_{commit[:12]}"
    _git("worktree", "add", "--detach", str(tree), commit)
    try:
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))


def commit_hash(name: str) -> str:
    """Return the full hash of a commit, tag or branch.

    Raises:
        ConfigurationError: git does not know it.
    """
    return _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")


def _git(*words: str) -> str:
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = ended.stderr.strip() or f"{words[-1].removesuffix('^{commit}')} is no commit of {ROOT}"
        raise ConfigurationError(f"git {words[0]}: {said}. Give a commit that `git log` shows")
    return ended.stdout.strip()
