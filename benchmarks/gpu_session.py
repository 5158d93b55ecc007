"""Runs a session on a GPU machine that is lent for minutes: is CUDA right, and how fast is it?

    python benchmarks/gpu_session.py --output "$OUT" --budget-seconds 540
    python benchmarks/gpu_session.py --phase matches-2           # one part: within 570 s by the limits of its cases
    python benchmarks/gpu_session.py --device cpu --phase matches --only bf16

Phases, in this order: facts (versions, compiler, attention kernels, groups of one rank), smoke (two small runs),
operators (each beside its plain reference, by number and time; what the machine's memory and matrix units reach),
matches (20 steps on the CPU and on the device: the first loss agrees within 1e-5 in fp32, 1e-2 in 16 bits), speed (a
GPT-2 of 124M parameters and a Llama-shaped 1.3B in bf16), stall (for how long a background save stops the training),
peers (nanoGPT, where the variable NANOGPT names its folder, and Hugging Face's Trainer, in turns with ours),
recurrences (our kernels and those of the package fla, where it is installed), switches (each flag that changes no loss,
on and off; what is off runs once a session), graphs (CUDA graphs on and off at 124M with microbatches of 4 and 8: equal
losses in every step), ranks (layouts of 2, 4 and 8 ranks against one rank, under both of torch's implementations of
NCCL; what needs more GPUs than there are is marked "not run").
benchmarks/gpu_cases.py lists the cases. Where the limits of a phase add up to more than 570 s, it has parts that can be
run one by one: --list names them.

A machine that has torch and no network needs what requirements.txt names besides: `pip download` the wheels elsewhere,
carry them along, `pip install --no-index --no-deps --target .site *.whl`, PYTHONPATH=.site. What is missing is said
first, and what can run without it runs.

Every case is a process of its own, killed with its children at its limit. Its result is on the disk, a line of
gpu-session-DEVICE-DATE.jsonl in the output folder, before the next one starts, and its output in a log next to it, as
is what the machine is (-machine.json); a failure does not keep the rest from running. What the budget has no time for
is marked "not run": the same command with --go-on runs what the records in the output folder lack, call after call. At
the end the logs are one file, gpu-session-DEVICE-DATE-logs.zip: whoever lends a machine may
send back few files.

Exit codes: 0 all that ran is right, 70 something is not.
"""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_cases import PACKAGES, PHASES, ROOT, SESSION, Case, parts
from benchmarks.gpu_trial import KEPT
from benchmarks.recording import heading
from megatron_ext.commandline import ToolParser, run_tool
from megatron_ext.errors import NumericError

CORES_OF_A_RUN = 4
_SHORTEST = 10.0
"""Seconds; with less of the budget left no case is begun."""


def main(argv: list[str]) -> int:
    options = _options(argv)
    planned = parts(options.device)
    chosen = [
        case
        for part, of_part in planned.items()
        for case in of_part
        if {part, case.phase} & {*options.phase}
        and re.search(options.only, f"{case.phase}: {case.name}", re.IGNORECASE)
    ]
    if options.go_on:
        recorded = have_run(Path(options.output), options.device)
        chosen = [case for case in chosen if (case.phase, case.name) not in recorded]
    if options.list:
        in_part = {id(case): part for part, of_part in planned.items() for case in of_part}
        for case in chosen:
            print(f"{case.phase}: {case.name} (<= {options.limit or case.limit:g} s, --phase {in_part[id(case)]})")
        return 0
    print(f"missing: {', '.join(missing(PACKAGES)) or 'nothing'}", flush=True)
    devices = options.devices or count_devices(options.device)
    session = Session(Path(options.output), options.device, options.budget_seconds, options.limit, devices)
    session.run(chosen, options.jobs)
    session.pack_logs()
    print(session.summary(), flush=True)
    wrong = [row["case"] for row in session.rows if row["status"] in ("failed", "timed out")]
    if wrong:
        raise NumericError(f"{len(wrong)} of {len(chosen)} are wrong: {'; '.join(wrong)}. The reasons are above.")
    return 0


def _options(argv: list[str]) -> Any:
    parser = ToolParser("Compare a device with the CPU, then measure how fast it trains.")
    folder = os.environ.get("OUT", str(ROOT / "benchmarks" / "results"))
    phases = tuple(dict.fromkeys([*PHASES, *parts("cuda"), *parts("cpu")]))
    jobs = max(1, (os.cpu_count() or 1) // CORES_OF_A_RUN)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="what is checked and measured")
    parser.add_argument("--output", metavar="FOLDER", default=folder, help="results and logs; default $OUT")
    parser.add_argument("--phase", nargs="+", choices=phases, default=tuple(PHASES), help="or parts of them")
    parser.add_argument("--only", metavar="PATTERN", default="", help="those whose 'phase: name' matches")
    parser.add_argument("--budget-seconds", type=float, metavar="S", default=SESSION, help="for everything together")
    parser.add_argument("--limit", type=float, metavar="S", help="for every case, in place of its own")
    parser.add_argument("--jobs", type=int, metavar="N", default=jobs, help="cases at a time that measure no speed")
    parser.add_argument("--devices", type=int, metavar="N", help="GPUs that there are, or processes on a CPU")
    parser.add_argument("--go-on", action="store_true", help="run what the records in the output folder lack")
    parser.add_argument("--list", action="store_true", help="print the cases and start nothing")
    return parser.parse_args(argv)


def count_devices(device: str) -> int:
    """Return how many GPUs torch sees, asked in a process of its own; for a CPU, how many processes have a core. At
    least 1: what one GPU is asked then says why there is none."""
    if device == "cpu":
        return os.cpu_count() or 1
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return max(1, int(said or 0))


def have_run(folder: Path, device: str) -> set[tuple[str, str]]:
    """Return phases and names of the cases that earlier sessions of a folder have brought to an end."""
    lines = [line for path in folder.glob(f"gpu-session-{device}-*.jsonl") for line in path.read_text().splitlines()]
    rows = [json.loads(line) for line in lines]
    return {(row["phase"], row["case"]) for row in rows if row["status"] != "not run"}


def missing(modules: Sequence[str]) -> list[str]:
    """Return those that are not installed."""
    return [name for name in modules if not _is_there(name)]


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # a parent package is missing
        return False


@dataclass
class Session:
    """Runs cases and keeps their results.

    Attributes:
        folder: folder of results and logs.
        budget: seconds from now on until no process of a case is left.
        limit: seconds that every case may take, in place of its own.
        devices: GPUs, or processes on a CPU, that a case may take.
    """

    folder: Path
    device: str
    budget: float
    limit: float | None = None
    devices: int = 1
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        stem = f"gpu-session-{self.device}-{datetime.now(UTC):%Y-%m-%d-%H%M%S}"
        self.path, self._logs = self.folder / f"{stem}.jsonl", self.folder / f"{stem}-logs"
        self._logs.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{stem}-machine.json").write_text(json.dumps(heading(), indent=1) + "\n")
        self._deadline = time.monotonic() + self.budget
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run(self, chosen: Sequence[Case], jobs: int = 1) -> None:
        """Run the cases in order, up to `jobs` at a time where they allow it. SIGTERM and Ctrl-C end them all."""
        before = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for together in _batches(chosen):
                with ThreadPoolExecutor(jobs if not together[0].alone else 1) as pool:
                    list(pool.map(self._run_and_keep, together))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def pack_logs(self) -> None:
        """Make one file of the logs."""
        shutil.make_archive(str(self._logs), "zip", self._logs)
        shutil.rmtree(self._logs)

    def _stop(self, *_signal: object) -> None:
        """End what runs, and begin nothing more: what remains is marked, and the summary follows."""
        with self._lock:
            self._stopped = True
        for process in list(self._running):
            self._end(process)

    def summary(self) -> str:
        counts = Counter(row["status"] for row in self.rows)
        lines = [f"{row['status']:>9}  {row['phase']}: {row['case']}" for row in self.rows if row["status"] != "passed"]
        return "\n".join([*lines, ", ".join(f"{n} {status}" for status, n in counts.items()), f"results: {self.path}"])

    def _run_and_keep(self, case: Case) -> None:
        began = time.monotonic()
        status, figures = self._result(case)
        self._keep(case, status, round(time.monotonic() - began, 2), figures)

    def _result(self, case: Case) -> tuple[str, dict[str, Any]]:
        """Return passed, failed, timed out or not run; and figures, or a reason."""
        lacking = missing(case.needs)
        wanted = self.limit or case.limit
        limit = min(wanted, self._deadline - time.monotonic())
        if lacking:
            return "not run", {"reason": f"missing: {', '.join(lacking)}"}
        if case.devices > self.devices:
            return "not run", {"reason": f"needs {case.devices} devices of {self.devices}"}
        if self._stopped or limit < min(_SHORTEST, wanted):
            return "not run", {"reason": "stopped" if self._stopped else "no time left"}
        log = self._logs / f"{re.sub('[^a-z0-9]+', '-', f'{case.phase} {case.name}'.lower())}.log"
        with log.open("wb") as output:
            process = self._start(case, output)
        if self._stopped:  # between the question above and the start
            self._end(process)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            self._end(process)
        text = log.read_text(errors="replace")
        figures: dict[str, Any] = _figures(text)
        if code == 0:
            return "passed", figures
        if self._stopped or (code is None and limit < wanted):
            return "not run", {"reason": "stopped" if self._stopped else "no time left"}
        figures["reason"] = f"more than {limit:.0f} s" if code is None else f"exit code {code}"
        return "timed out" if code is None else "failed", {**figures, "output": text.splitlines()[-20:]}

    def _start(self, case: Case, output: Any) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        # One machine: NCCL and gloo need no network interface but the loopback.
        local = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(CORES_OF_A_RUN)}
        environment = {**local, **os.environ, "PYTHONPATH": path, KEPT: str(self._logs.resolve())}
        with self._lock:
            process = subprocess.Popen(
                case.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            self._running.add(process)
        return process

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kill what is left of a case: a session of its own is a process group of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        with self._lock:
            self._running.discard(process)

    def _keep(self, case: Case, status: str, seconds: float, figures: dict[str, Any]) -> None:
        row = {"phase": case.phase, "case": case.name, "status": status, "seconds": seconds, **figures}
        with self._lock:
            self.rows.append(row)
            with self.path.open("a") as file:  # one write of a whole line: a kill leaves whole lines
                file.write(json.dumps(row) + "\n")
                file.flush()
                os.fsync(file.fileno())
            print(json.dumps(row), flush=True)


def _batches(chosen: Sequence[Case]) -> list[list[Case]]:
    """Yield neighbours that may run at the same time; a case that runs alone is a batch of one."""
    batches: list[list[Case]] = []
    for case in chosen:
        if case.alone or not batches or batches[-1][0].alone or batches[-1][0].phase != case.phase:
            batches.append([])
        batches[-1].append(case)
    return batches


def _figures(text: str) -> dict[str, Any]:
    """Return the figures of the last line `RESULT {...}`; none without one."""
    found = [line for line in text.splitlines() if line.startswith("RESULT ")]
    try:
        return {"figures": json.loads(found[-1].removeprefix("RESULT "))} if found else {}
    except ValueError:
        return {}


if __name__ == "__main__":
    run_tool(main)
