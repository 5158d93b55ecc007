"""Does a change leave every bit of what is trained, saved, resumed, resharded and exported as it was?

    python tools/loss_compare.py main                            # the working tree, as it is, against main
    python tools/loss_compare.py HEAD~3 HEAD --quick             # two commits, fewer layouts
    python tools/loss_compare.py main --all --cache ~/.cache/loss_compare   # every row of docs/parity.md too

Each commit is checked out into a folder of its own and trains a fixed set of layouts on CPU ranks. One line for each
layout: `identical`, or the first stage, step and field that differ, with both values. Compared to the bit: all metrics
but times, rates and memory; every tensor of every checkpoint by its global name; the files exported for transformers.
Files of checkpoints that differ in their bytes are named, but count only with --files: a new field in config.yaml is
no harm. With --cache the results of commits are kept, so that a series of comparisons runs the base once.

Exit codes: 0 identical, 1 something differs or fails, 64 the flags cannot work.
"""

import json
import signal
import sys
import time
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import ConfigurationError
from tests.support.losses import layouts
from tests.support.losses.commits import Job, Result, commit_hash, results, scratch_folder
from tests.support.losses.compare import different_files, first_difference


def main(argv: list[str]) -> int:
    """Run the tool with the command line `argv` and return its exit code."""
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks end and checkouts are removed
    jobs = _chosen(options)
    base, head = commit_hash(options.base), commit_hash(options.head) if options.head else None
    different = 0
    with scratch_folder() as scratch:
        known = _run_base(base, jobs, scratch, options)
        for name, result in results(head, jobs, scratch, options.cache, options.jobs):
            different += _tell(name, known[name], result, options)
    print(f"{len(jobs) - different} of {len(jobs)} layouts are identical", flush=True)
    return 1 if different else 0


def _parser() -> ToolParser:
    parser = ToolParser("Compare what two commits train, save, resume, reshard and export, to the bit.")
    parser.add_argument("base", metavar="BASE", help="commit that says how it must be")
    parser.add_argument("head", nargs="?", metavar="HEAD", help="commit to compare; default the working tree as it is")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="fewer layouts")
    sizes.add_argument("--all", action="store_true", help="also every row of docs/parity.md, in fp32 and bf16")
    sizes.add_argument("--layouts", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--files", action="store_true", help="the bytes of checkpoint files count too")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="layouts that run at a time; default 2")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep the results of commits there, and use them")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append one JSON line for each layout")
    parser.add_argument("--skip-done", action="store_true", help="leave out layouts that --output already has")
    return parser


def _chosen(options: Namespace) -> dict[str, Job]:
    jobs = layouts.chosen("all" if options.all or options.layouts else "quick" if options.quick else "default")
    unknown = [name for name in options.layouts or [] if name not in jobs]
    if unknown:
        raise ConfigurationError(f"--layouts {unknown[0]!r} is not one of: {'; '.join(jobs)}")
    if options.jobs < 1:
        raise ConfigurationError(f"--jobs {options.jobs} must be positive; leave it out for 2")
    return {name: jobs[name] for name in options.layouts or jobs if name not in _done(options)}


def _done(options: Namespace) -> set[str]:
    """Return the layouts that --output already has a verdict on."""
    if not options.skip_done or options.output is None or not options.output.exists():
        return set()
    return {json.loads(line)["layout"] for line in options.output.read_text().splitlines()}


def _run_base(commit: str, jobs: dict[str, Job], scratch: Path, options: Namespace) -> dict[str, Result]:
    """Return all results of the base; progress goes to the standard error."""
    found, started = {}, time.monotonic()
    for name, result in results(commit, jobs, scratch, options.cache, options.jobs):
        found[name] = result
        seconds = time.monotonic() - started
        print(f"base {len(found)} of {len(jobs)}, {seconds:.0f} s: {name}", file=sys.stderr, flush=True)
    return found


def _tell(name: str, base: Result, head: Result, options: Namespace) -> bool:
    """Print the verdict on a layout; return True where it counts as different."""
    found, files = first_difference(base, head), different_files(base, head)
    if found is None and files and options.files:
        found = f"file {files[0]} differs"
    note = f" (bytes differ: {', '.join(files)})" if files and found is None else ""
    print(f"{name}: {found or 'identical'}{note}", flush=True)
    if options.output is not None:
        with options.output.open("a", encoding="utf-8") as output:
            output.write(json.dumps({"layout": name, "difference": found, "files": files}) + "\n")
    return found is not None


if __name__ == "__main__":
    run_tool(main)
