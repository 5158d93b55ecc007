"""Does a change leave every bit of what is trained, saved, resumed, resharded and exported as it was?

    python tools/loss_compare.py main                         # the working tree, as it is, against main
    python tools/loss_compare.py HEAD~3 HEAD --quick          # two commits, fewer layouts
    python tools/loss_compare.py main --all --cache /tmp/loss # every layout of docs/parity.md, in fp32 and bf16

Each commit is checked out into a folder of its own and trains a fixed set of layouts on CPU ranks. One line for each
layout: `identical`, or the first stage, step and field that differ with both values. Compared to the bit: all metrics
but times, rates and memory; every tensor of every checkpoint by its global name; the files exported for transformers.
Files of checkpoints that differ in their bytes are named, but count only with --files: their metadata may change
without harm. With --cache the results of a commit are kept, so that a series of comparisons runs the base once.

Exit codes: 0 identical, 1 something differs or fails, 64 the flags cannot work.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import ConfigurationError
from megatron_ext.verify.losses import compare, layouts, run

ROOT = Path(__file__).resolve().parents[1]
Results = dict[str, dict[str, Any]]


def main(argv: list[str]) -> int:
    parser = ToolParser("Compare what two commits train, to the bit.")
    parser.add_argument("base", metavar="BASE", help="commit that says how it must be")
    parser.add_argument("head", nargs="?", metavar="HEAD", help="commit to compare; default the working tree as it is")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="the fewest layouts")
    sizes.add_argument("--all", action="store_true", help="also every row of docs/parity.md, in fp32 and bf16")
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--files", action="store_true", help="bytes of checkpoint files count too")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="layouts that run at a time")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the results of commits here, and use them")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines, one for each layout")
    parser.add_argument("--skip-done", action="store_true", help="leave out layouts that --output already has")
    options = parser.parse_args(argv)
    jobs = _without_done(_chosen(options), options)
    commits = [_commit(options.base), _commit(options.head) if options.head else None]
    with _scratch(options.cache) as scratch:
        layouts.write_corpus(scratch / "data")
        base = _collect(commits[0], jobs, scratch, options.cache, options.jobs)
        differing = 0
        for name, head in _results(commits[1], jobs, scratch, options.cache, options.jobs):
            differing += _tell(name, base[name], head, options)
    print(f"{len(jobs) - differing} of {len(jobs)} layouts are identical", flush=True)
    return 1 if differing else 0


def _chosen(options: Any) -> dict[str, dict[str, Any]]:
    jobs = layouts.chosen("all" if options.all or options.layouts else "quick" if options.quick else "default")
    unknown = [name for name in options.layouts or [] if name not in jobs]
    if unknown:
        raise ConfigurationError(f"--layouts {unknown[0]!r} is not one of: {'; '.join(jobs)}")
    return {name: jobs[name] for name in options.layouts or jobs}


def _without_done(jobs: dict[str, dict[str, Any]], options: Any) -> dict[str, dict[str, Any]]:
    if not options.skip_done or options.output is None or not options.output.exists():
        return jobs
    done = {json.loads(line)["layout"] for line in options.output.read_text().splitlines()}
    return {name: job for name, job in jobs.items() if name not in done}


def _tell(name: str, base: dict[str, Any], head: dict[str, Any], options: Any) -> bool:
    """Print the verdict on a layout; True where it counts as different."""
    found, files = compare.first_difference(base, head), compare.different_files(base, head)
    if found is None and options.files and files:
        found = f"file {files[0]} differs"
    note = f" (bytes differ: {', '.join(files)})" if files and found is None else ""
    print(f"{name}: {found or 'identical'}{note}", flush=True)
    if options.output is not None:
        with options.output.open("a") as output:
            output.write(json.dumps({"layout": name, "difference": found, "files": files}) + "\n")
    return found is not None


def _collect(commit: str | None, jobs: Results, scratch: Path, cache: Path | None, workers: int) -> Results:
    """All results of the base, which is run first; its progress goes to the standard error."""
    found, started = {}, time.monotonic()
    for name, result in _results(commit, jobs, scratch, cache, workers):
        found[name] = result
        seconds = time.monotonic() - started
        print(f"base {len(found)} of {len(jobs)}: {name} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return found


def _results(
    commit: str | None, jobs: Results, scratch: Path, cache: Path | None, workers: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the result of every job, kept or run; those that are run in the order in which they end."""
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
        for result in _run(tree, list(left.values()), scratch, workers):
            path = _kept(cache, commit, left[result["name"]])
            if path is not None and "failed" not in result:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.with_suffix(".tmp").write_text(json.dumps(result))
                path.with_suffix(".tmp").replace(path)
            yield result["name"], result


def _kept(cache: Path | None, commit: str | None, job: dict[str, Any]) -> Path | None:
    """Where the result of a job is kept; it follows from commit, job, torch, and the CPU. None: nowhere."""
    if cache is None or commit is None:
        return None
    key = json.dumps([run.VERSION, layouts.corpus_hash(), job, version("torch"), version("megatron-core"), cpu_kind()])
    name = f"{layouts.slug(job['name'])}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"
    return cache / commit / name


def cpu_kind() -> str:
    """Vendor, model and vector instructions: other kernels give other bits."""
    from megatron_ext import device

    device.install("cpu")
    import torch

    return f"{device.current().model_name}, {torch.backends.cpu.get_cpu_capability()}"


def _run(tree: Path, jobs: list[dict[str, Any]], scratch: Path, workers: int) -> Iterator[dict[str, Any]]:
    """Yield results as they come from one process that runs the jobs with the code of `tree`."""
    with tempfile.TemporaryDirectory(dir=scratch) as own:
        asked, answers, log = Path(own) / "jobs.json", Path(own) / "results.jsonl", Path(own) / "log"
        asked.write_text(json.dumps(jobs))
        answers.touch()
        variables = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PYTHONSTARTUP")
        environment = {name: value for name, value in os.environ.items() if name not in variables}
        environment |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        command = [sys.executable, run.__file__, str(tree), str(asked), str(answers), str(workers)]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, cwd=scratch, env=environment, stdout=errors, stderr=errors)
        try:
            with answers.open() as lines:
                yield from _follow(lines, process)
            if process.returncode:
                raise ConfigurationError(f"the runs of {tree} ended early: {log.read_text(errors='replace')[-2000:]}")
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()


def _follow(lines: Any, process: subprocess.Popen) -> Iterator[dict[str, Any]]:
    partial = ""
    while True:
        ended = process.poll() is not None
        for piece in lines.readlines():
            partial += piece
            if partial.endswith("\n"):
                yield json.loads(partial)
                partial = ""
        if ended:
            return
        time.sleep(0.2)


@contextlib.contextmanager
def _scratch(cache: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="loss_compare_") as folder:
        yield Path(folder).resolve()


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


def _commit(name: str) -> str:
    return _git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")


def _git(*words: str) -> str:
    ended = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = ended.stderr.strip() or f"{words[-1]} is no commit of {ROOT}"
        raise ConfigurationError(f"git {words[0]} failed: {said}. Give commits that `git log` shows")
    return ended.stdout.strip()


if __name__ == "__main__":
    run_tool(main)
