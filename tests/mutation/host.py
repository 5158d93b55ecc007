"""A warm process: everything is imported and collected once, and each mutant is tried in a fork of it.

    python -m tests.mutation.host JOBS.json RESULTS.jsonl      # in the root of a copy of the tree

In the fork the changed function takes the place of the loaded one, and ranks are forked from there, so that they have
it, too. The changed file lies in the copy meanwhile, for tests that start interpreters of their own. The same process
records which lines of the package each test executes, its ranks included.
"""

import contextlib
import ctypes
import gc
import json
import math
import mmap
import multiprocessing
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

_MONITOR = sys.monitoring.COVERAGE_ID
_PR_SET_CHILD_SUBREAPER = 36
_CO_OPTIMIZED = 1
_NOW = "now"
"""The file that names the test that runs, for one that hangs."""
_IDLE = 0.05
"""The share of a processor below which processes count as waiting; heartbeats of ranks take a tenth of it."""


class Lines:
    """The lines of the package that this process and those forked from it execute, in memory that they share."""

    def __init__(self, root: Path):
        self._first: dict[str, int] = {}
        self._files: list[tuple[str, int, int]] = []
        size = 0
        for path in sorted((root / "megatron_ext").rglob("*.py")):
            count = len(path.read_bytes().splitlines()) + 1
            self._first[str(path)] = size
            self._files.append((str(path.relative_to(root)), size, count))
            size += count
        self._hit = mmap.mmap(-1, size)
        sys.monitoring.use_tool_id(_MONITOR, "mutation")
        sys.monitoring.register_callback(_MONITOR, sys.monitoring.events.LINE, self._on_line)

    def _on_line(self, code: CodeType, line: int) -> object:
        first = self._first.get(code.co_filename)
        if first is not None:
            self._hit[first + line] = 1
        return sys.monitoring.DISABLE

    def begin(self) -> None:
        """Forget what was executed, and watch."""
        self._hit[:] = bytes(len(self._hit))
        sys.monitoring.set_events(_MONITOR, sys.monitoring.events.LINE)
        sys.monitoring.restart_events()

    def end(self) -> dict[str, list[int]]:
        """Return the executed lines by file."""
        sys.monitoring.set_events(_MONITOR, 0)
        found = {}
        for path, first, count in self._files:
            part = self._hit[first : first + count]
            if any(part):
                found[path] = [line for line, byte in enumerate(part) if byte]
        return found


class Host:
    """A plugin of pytest that runs jobs in the place of its loop over the tests."""

    def __init__(self, root: Path, jobs: dict[str, Any], results: Path, lines: Lines, at_import: dict[str, list[int]]):
        self.root, self.jobs, self.results, self.lines, self.at_import = root, jobs, results, lines, at_import
        self.failed: list[str] = []
        self.functions: dict[tuple[str, str, int], list[FunctionType]] = {}

    def pytest_runtestloop(self, session: Any) -> bool:
        """Run all jobs that the time allows."""
        ctypes.CDLL(None).prctl(
            _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0
        )  # orphans of a killed job become ours, to be killed
        gc.unfreeze()
        self.functions = _loaded_functions(self.root)
        gc.freeze()
        items = {item.nodeid: item for item in session.items}
        deadline = time.monotonic() + self.jobs["seconds"]
        if self.jobs["mode"] == "record":
            self._record_all(session, items, deadline)
        else:
            self._try_all(session, items, deadline)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note a test that fails."""
        if report.failed:
            said = str(report.longrepr).strip().splitlines()
            error = next((line for line in reversed(said) if line.startswith("E ")), said[-1] if said else "")
            self.failed.append(f"{report.nodeid}: {error[2:].strip()[:200]}")

    def _record_all(self, session: Any, items: dict[str, Any], deadline: float) -> None:
        self._write({"item": "import", "seconds": 0.0, "lines": self.at_import})
        by_file = defaultdict(list)
        for item in items.values():
            by_file[item.nodeid.split("::")[0]].append(item)
        for name, several in sorted(by_file.items(), key=lambda pair: self.jobs["files"].index(pair[0])):
            if time.monotonic() > deadline:
                break
            self._in_fork(lambda several=several: self._record(session, several), 500.0)
            self._write({"file": name})

    def _record(self, session: Any, items: list[Any]) -> dict[str, Any]:
        session.items = items
        for number, item in enumerate(items):
            self.lines.begin()
            began, processor = time.monotonic(), _processor_seconds()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=(items[number + 1 :] or [None])[0])
            seconds, processor = time.monotonic() - began, _processor_seconds() - processor
            fails = bool(self.failed)
            self.failed.clear()
            self._write(
                {"item": item.nodeid, "seconds": round(seconds, 3), "processor": round(processor, 3), "fails": fails,
                 "lines": self.lines.end()}
            )  # fmt: skip
        return {}

    def _try_all(self, session: Any, items: dict[str, Any], deadline: float) -> None:
        known = set(self.jobs["known"])  # others were written since the lines were recorded
        for job in self.jobs["jobs"]:
            if time.monotonic() > deadline:
                break
            files = {name.split("::")[0] for name in job["items"]}
            new = [name for name in items if name not in known and name.split("::")[0] in files]
            chosen = [items[name] for name in (*job["items"], *new) if name in items]
            path = self.root / job["path"]
            source = path.read_text(encoding="utf-8")
            began = time.monotonic()
            path.write_text(job["source"], encoding="utf-8")
            try:
                found = self._try_by_file(session, chosen, job)
            finally:
                path.write_text(source, encoding="utf-8")
            self._write({**job["mutant"], **found, "seconds": round(time.monotonic() - began, 1)})

    def _try_by_file(self, session: Any, items: list[Any], job: dict[str, Any]) -> dict[str, Any]:
        """Try each file of tests in a fork of its own: threads of one may hold locks when ranks of the next are
        forked, which then wait for ever."""
        by_file = defaultdict(list)
        for item in items:
            by_file[item.nodeid.split("::")[0]].append(item)
        found: dict[str, Any] = {}
        tests = 0
        for file, several in by_file.items():
            began = time.monotonic()
            found = self._in_fork(lambda c=several: self._try(session, c, job), *job["limits"][file])
            print(f"\n{file}: {len(several)} tests, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
            tests += found["tests"]
            if found["outcome"] == "caught":
                break
        return {**found, "tests": tests}

    def _try(self, session: Any, items: list[Any], job: dict[str, Any]) -> dict[str, Any]:
        changed = replace_function(self.functions, str(self.root / job["path"]), job["source"])
        session.items = items
        for number, item in enumerate(items):
            Path(os.environ["PYTEST_DEBUG_TEMPROOT"], _NOW).write_text(item.nodeid)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=(items[number + 1 :] or [None])[0])
            if self.failed:
                test, _, error = self.failed[0].partition(": ")
                return {"outcome": "caught", "by": test, "error": error, "tests": number + 1}
        return {"outcome": "survived", "tests": len(items), "functions": changed}

    def _in_fork(self, action: Callable[[], dict[str, Any]], limit: float, idle: float = math.inf) -> dict[str, Any]:
        """Return what `action` does in a fork, whose processes and files are gone afterwards.

        It has hung after `limit` seconds, or where its processes have computed next to nothing for `idle` seconds.
        """
        folder = tempfile.mkdtemp(prefix="mutation_")
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.setsid()
            os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
            try:
                found = action()
            except BaseException:
                found = {
                    "outcome": "caught",
                    "by": "",
                    "error": traceback.format_exc().splitlines()[-1][:200],
                    "tests": 0,
                }
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
        os.close(writer)
        ready, waited = until_ready(reader, limit, idle)
        said = os.read(reader, 1 << 16) if ready else b""
        os.close(reader)
        _end_all()
        now = Path(folder, _NOW)
        test = now.read_text() if now.exists() else ""
        shutil.rmtree(folder, ignore_errors=True)
        if said:
            return json.loads(said)
        error = "the test process died" if ready else waited
        return {"outcome": "caught", "by": test, "error": error, "tests": 0}

    def _write(self, row: dict[str, Any]) -> None:
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def until_ready(reader: int, limit: float, idle: float) -> tuple[bool, str]:
    """Wait until a pipe can be read; return whether it can, and else how the processes of this one have hung.

    Ranks that wait for one another use no processor: they are found long before the time is over that a busy machine
    would need.
    """
    began = last = time.monotonic()
    busy = _of_descendants()
    while time.monotonic() - began < limit:
        if select.select([reader], [], [], min(1.0, idle / 4))[0]:
            return True, ""
        now = _of_descendants()
        if now.keys() != busy.keys() or sum(now.values()) - sum(busy.values()) > _IDLE * (time.monotonic() - last):
            last, busy = time.monotonic(), now
        elif time.monotonic() - last > idle:
            return False, f"idle for {idle:.1f} s"
    return False, f"over {limit:.1f} s"


def _of_descendants() -> dict[int, float]:
    """Return the processor seconds of every process that this one or its children have started."""
    import psutil

    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            found[process.pid] = times.user + times.system
    return found


def _processor_seconds() -> float:
    """Return the processor time of this process and of those that it has waited for."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _end_all() -> None:
    """Kill every process that this one or its children have started, and wait for them."""
    import psutil

    for _ in range(100):
        left = psutil.Process().children(recursive=True)
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _loaded_functions(root: Path) -> dict[tuple[str, str, int], list[FunctionType]]:
    """Return every loaded function of the package, by the file, name and line of its code."""
    found = defaultdict(list)
    for function in gc.get_objects():
        if type(function) is FunctionType and function.__code__.co_filename.startswith(f"{root}/megatron_ext/"):
            code = function.__code__
            found[code.co_filename, code.co_qualname, code.co_firstlineno].append(function)
    return found


def replace_function(functions: dict[tuple[str, str, int], list[FunctionType]], path: str, source: str) -> int:
    """Give loaded functions the code that they have in another text of their file; return how many have changed."""
    changed = 0
    for code in outer_functions(compile(source, path, "exec")):
        for function in functions.get((path, code.co_qualname, code.co_firstlineno), ()):
            if function.__code__ != code:
                function.__code__ = code
                changed += 1
    return changed


def outer_functions(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of functions that lie in no other function: of a module, and of its classes."""
    for constant in code.co_consts:
        if not isinstance(constant, CodeType):
            continue
        if constant.co_flags & _CO_OPTIMIZED and not constant.co_name.startswith("<generic"):
            yield constant
        else:
            yield from outer_functions(constant)


def main(argv: Sequence[str]) -> int:
    """Run the jobs of a file; see the top of this one."""
    jobs, results = json.loads(Path(argv[0]).read_text()), Path(argv[1])
    root = Path.cwd()
    sys.path.insert(0, str(root))
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    lines = Lines(root)
    lines.begin()
    if not jobs["light"]:
        import megatron_ext.verify.preload  # noqa: F401
        from megatron_ext.verify import ranks

        ranks.forkserver = lambda: multiprocessing.get_context("fork")
    import pytest

    host = Host(root, jobs, results, lines, {})
    host.at_import = lines.end()
    options = ["-p", "no:cacheprovider", "-q", "--capture=fd", *(["--noconftest"] if jobs["light"] else [])]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        return int(pytest.main([*options, *jobs["files"]], plugins=[host]))
    finally:
        _end_all()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
