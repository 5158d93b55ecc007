"""benchmarks/gpu_session.py: limits, what is on the disk when, and that a failure stops nothing; no GPU, no torch."""

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_peers, gpu_trial
from benchmarks.gpu_cases import GRAPHED, GRAPHS, LLAMA, MATCHES, PHASES, SMALL, SWITCHES, Case, cases
from benchmarks.gpu_session import Session
from megatron_ext.train.configure import configure

ROOT = Path(__file__).resolve().parents[3]
HANGS = "import signal, subprocess\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\nsignal.pause()"


def case(name: str, program: str, limit: float = 30.0, **other: Any) -> Case:
    return Case(name, "trial", (sys.executable, "-c", program), limit=limit, **other)


def rows(session: Session) -> list[dict[str, Any]]:
    return [json.loads(line) for line in session.path.read_text().splitlines()]


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or is only waited for by nobody yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_case_that_hangs_and_one_that_fails_cost_no_other(tmp_path: Path) -> None:
    session = Session(tmp_path, "cpu", budget=120.0)
    counts = f"import pathlib; (file,) = pathlib.Path({str(tmp_path)!r}).glob('*.jsonl')\n"
    counts += "print('RESULT', len(file.read_text().splitlines()))"
    session.run(
        [
            case("hangs", HANGS, limit=3.0),  # a busy machine needs some of it to start Python
            case("fails", "print('why it fails'); raise SystemExit(3)"),
            case("counts", counts),
            case("needs more", "", needs=("no_such_module", "no_such.module")),
        ]
    )
    found = rows(session)
    assert [(row["case"], row["status"]) for row in found] == [
        ("hangs", "timed out"),
        ("fails", "failed"),
        ("counts", "passed"),
        ("needs more", "not run"),
    ]
    assert has_ended(int(found[0]["output"][0])), "its child, too"
    assert (found[1]["reason"], found[1]["output"]) == ("exit code 3", ["why it fails"])
    assert found[2]["figures"] == 2, "the results of those before were on the disk"
    assert found[3]["reason"] == "missing: no_such_module, no_such.module"
    assert "timed out  trial: hangs" in session.summary()
    assert "1 passed" in session.summary()


PROGRAM = """
import sys, pathlib
sys.path.insert(0, {root!r})
from benchmarks.gpu_session import Session
from tests.unit.benchmarks.test_gpu_session import HANGS, case
session = Session(pathlib.Path({folder!r}), "cpu", budget=600.0)
session.run([case("quick", ""), case("hangs", HANGS, limit=500.0), case("last", "")])
print(session.summary())
"""


def test_what_was_measured_stays_when_the_session_is_stopped(tmp_path: Path) -> None:
    program = PROGRAM.format(root=str(ROOT), folder=str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline and not any(log.stat().st_size for log in tmp_path.glob("*/trial-hangs.log")):
            time.sleep(0.05)
        child = int(next(tmp_path.glob("*/trial-hangs.log")).read_text())
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=60.0)[0]
    finally:
        process.kill()
    written = [json.loads(line) for line in next(tmp_path.glob("*.jsonl")).read_text().splitlines()]
    assert [(row["case"], row["status"]) for row in written] == [
        ("quick", "passed"),
        ("hangs", "not run"),
        ("last", "not run"),
    ]
    assert has_ended(child)
    assert "1 passed, 2 not run" in said


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_cases_have_names_of_their_own_and_commands_that_exist(device: str) -> None:
    found = cases(device)
    assert len({(case.phase, case.name) for case in found}) == len(found)
    assert {case.phase for case in found} <= PHASES.keys()
    assert all(Path(case.command[1]).exists() and case.command[2] == device for case in found)
    assert {case.name for case in found if "einops" in case.needs} == {name for name in MATCHES if "ZeRO" in name}
    assert ("speed" in {case.phase for case in found}) == (device == "cuda")
    runs = [case for case in found if Path(case.command[1]).name in ("gpu_trial.py", "gpu_peers.py")]
    assert all({"numpy", "packaging", "psutil", "yaml"} <= {*case.needs} for case in runs), "imported by every run"


def test_what_is_trained_can_be_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU each flag is judged as for a GPU, but for FP8 and what it asks the machine."""
    asked: list[str] = []
    monkeypatch.setattr(
        gpu_trial, "logged", lambda _device, flags: asked.append(flags) or ([{"elapsed_ms": 0.0}] * 60, "")
    )
    monkeypatch.setattr(
        gpu_peers.gpu_trial,
        "train",
        lambda _device, flags: asked.append(flags) or [{"elapsed_ms": 0.0, "lm_loss": 6.0}] * 60,
    )
    for device in ("cpu", "cuda"):
        gpu_peers.ours(device)
        gpu_trial.stall(device, SMALL + LLAMA)
    asked += [f"{flags}{GRAPHS}{gpu_trial.TIMED}" for flags in GRAPHED.values()]
    for flags in (*MATCHES.values(), *SWITCHES.values()):
        asked.append(f"{SMALL} {flags if flags in MATCHES.values() else LLAMA + flags}")
    for flags in asked:
        configure(["--device", "cpu", *flags.split()])


def test_graphs_are_judged_by_the_losses_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tokens_per_second", "tflops_per_gpu", "mfu", "peak_memory_bytes")
    late: list[float] = []
    banner = ["megatron-ext", "graphs  after 3 steps"]

    def train(device: str, flags: str) -> list[dict[str, Any]]:
        on = GRAPHS in flags
        losses = [6.0] * 59 + (late if on else [6.0])
        return [{"lm_loss": loss, "elapsed_ms": 8.0 if on else 10.0, **dict.fromkeys(names)} for loss in losses]

    monkeypatch.setattr(gpu_trial, "train", train)
    monkeypatch.setattr(gpu_trial, "logged", lambda device, flags: (train(device, flags), "\n".join(banner)))
    for last, wrong in ((6.0, False), (6.001, False), (6.1, True), (float("nan"), True)):
        late[:] = [last]
        found = gpu_trial.graphs("cuda", f"{SMALL}|{GRAPHS}")
        assert ("wrong" in found) == wrong
        assert found["times as fast"] == 1.25
        assert found["first other loss"] == (60 if last in (6.001, 6.1) else None)
    late[:] = [6.0]
    banner.pop()
    assert gpu_trial.graphs("cuda", f"{SMALL}|{GRAPHS}")["wrong"] == "the program made no graph"
    assert "wrong" not in gpu_trial.graphs("cpu", f"{SMALL}|{GRAPHS}")


def test_what_a_gpu_trains_can_be_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8, too, whose recipes do not take every size."""
    monkeypatch.setattr("megatron_ext.train.configure.shows_gpu", lambda: True)
    trials = [case.command[3:] for case in cases("cuda") if case.command[1].endswith("gpu_trial.py")]
    asked = [flags for kind, flags in trials if kind in ("loss", "match")]
    timed = ("speed", "switch", "graphs")
    asked += [f"{flags.replace('|', ' ')} {gpu_trial.TIMED}" for kind, flags in trials if kind in timed]
    assert len([flags for flags in asked if "--fp8-format" in flags]) == 6
    assert len([flags for flags in asked if GRAPHS in flags]) == len(GRAPHED) + 2
    if importlib.util.find_spec("fla") is None:
        asked = [flags.replace("--recurrence-kernels fla", "") for flags in asked]
    for flags in asked:
        config = configure(["--device", "cuda", *flags.split()]).config
        assert config.training.cuda_graph_impl == ("full_iteration" if GRAPHS in flags else "none")
