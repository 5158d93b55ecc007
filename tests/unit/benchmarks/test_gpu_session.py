"""benchmarks/gpu_session.py: limits, what is on the disk when, and that a failure stops nothing; no GPU, no torch."""

import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_peers, gpu_session, gpu_trial
from benchmarks.gpu_cases import GRAPHED, GRAPHS, LLAMA, MATCHES, PHASES, SMALL, SWITCHES, Case, cases
from benchmarks.gpu_session import Session, main, missing
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


def test_the_budget_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_session, "_SHORTEST", 0.5)
    session = Session(tmp_path, "cpu", budget=1.5)
    session.run([case("hangs", HANGS, limit=600.0, alone=True), case("never begun", "", limit=600.0)])
    assert [row["status"] for row in rows(session)] == ["timed out", "not run"]
    assert rows(session)[0]["seconds"] < 60.0


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


def test_several_run_at_a_time_unless_their_times_count(tmp_path: Path) -> None:
    def meets(other: str) -> str:
        """Waits for a file that the other makes."""
        return (
            f"import pathlib, time; folder = pathlib.Path({str(tmp_path)!r}); (folder / 'not {other}').touch()\n"
            f"while not (folder / 'not {'b' if other == 'a' else 'a'}').exists(): time.sleep(0.01)"
        )

    session = Session(tmp_path, "cpu", budget=120.0)
    session.run([case("a", meets("a")), case("b", meets("b"))], jobs=2)
    assert [row["status"] for row in rows(session)] == ["passed", "passed"]
    for mark in tmp_path.glob("not *"):
        mark.unlink()
    session = Session(tmp_path / "alone", "cpu", budget=120.0)
    session.run([case("a", meets("a"), limit=3.0, alone=True), case("b", meets("b"), alone=True)], jobs=2)
    assert [row["status"] for row in rows(session)] == ["timed out", "passed"]


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


def test_peers_that_are_not_there_are_no_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NANOGPT", raising=False)
    gpu_peers.main("cuda", "nanoGPT")
    monkeypatch.setenv("NANOGPT", str(tmp_path))
    (tmp_path / "model.py").touch()
    gpu_peers.main("cuda", "nanoGPT")
    monkeypatch.setattr(gpu_session, "missing", lambda modules: list(modules))
    gpu_peers.main("cuda", "Trainer")
    said = [json.loads(line.removeprefix("RESULT ")) for line in capsys.readouterr().out.splitlines()]
    assert said == [
        {"missing": "the variable NANOGPT, the folder of a checkout of karpathy/nanoGPT"},
        {"missing": f"train.py, configurator.py in {tmp_path}"},
        {"missing": "transformers, accelerate"},
    ]


def test_ours_is_compared_with_its_neighbour_in_time() -> None:
    """Ratios of one turn count, and not those of medians over all turns."""
    turns = [
        {"ours": ([10.0, 12.0, 11.0], 6.2), "nanoGPT": ([22.0], 6.3)},
        {"ours": ([100.0], 6.2), "nanoGPT": ([100.0], 6.3)},
    ]
    found = gpu_peers.compared(turns, "nanoGPT")
    assert found["ms a step"] == {"ours": 55.5, "nanoGPT": 61.0}
    assert found["times as fast"] == {"ours": 1.5}
    assert found["first losses"] == {"ours": 6.2, "nanoGPT": 6.3}


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
    for flags in asked:
        config = configure(["--device", "cuda", *flags.split()]).config
        assert config.training.cuda_graph_impl == ("full_iteration" if GRAPHS in flags else "none")


def test_what_is_off_is_run_once_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def logged(_device: str, flags: str) -> tuple[list[dict[str, Any]], str]:
        ran.append(" ".join(flags.split()))
        row = {"elapsed_ms": float(len(ran)), "lm_loss": 6.25, "mfu": None}
        return [row | dict.fromkeys(("tokens_per_second", "tflops_per_gpu", "peak_memory_bytes"), 1.0)] * 30, ""

    monkeypatch.setattr(gpu_trial, "logged", logged)
    assert gpu_trial.switch("cpu", "--one|--other")["off"]["elapsed_ms"] == 1.0, "nothing is kept outside of a session"
    monkeypatch.setenv(gpu_trial.KEPT, str(tmp_path))
    assert gpu_trial.speed("cpu", "--one ")["elapsed_ms"] == 3.0
    for number in (4, 5):
        found = gpu_trial.switch("cpu", "--one|--other")
        assert (found["off"]["elapsed_ms"], found["on"]["elapsed_ms"]) == (3.0, number)
    gpu_trial.speed("cpu", "--one --two")
    plain = f"--one {gpu_trial.TIMED}"
    switched = f"--one --other {gpu_trial.TIMED}"
    assert ran == [plain, switched, plain, switched, switched, f"--one --two {gpu_trial.TIMED}"]


def test_a_session_tells_its_cases_where_runs_are_kept_and_leaves_three_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = f"import os; open(os.path.join(os.environ[{gpu_trial.KEPT!r}], 'kept.json'), 'w'); print('said')"
    monkeypatch.setattr(gpu_session, "cases", lambda _device: [case("says", says)])
    monkeypatch.setattr(gpu_session, "PHASES", {"trial": None})
    assert main(["--device", "cpu", "--output", str(tmp_path)]) == 0
    archive, results, machine = sorted(tmp_path.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert (archive.suffix, results.suffix, machine.suffix) == (".zip", ".jsonl", ".json")
    with zipfile.ZipFile(archive) as logs:
        assert {"kept.json", "trial-says.log"} <= set(logs.namelist())
        assert logs.read("trial-says.log") == b"said\n"


def test_the_stall_is_what_the_program_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"elapsed_ms": float(number)} for number in range(12)]
    text = "checkpoint: saved a in 2.0 s (in the background; training stopped for 0.3 s)\nother\n"
    monkeypatch.setattr(gpu_trial, "logged", lambda *_: (rows, text))
    assert gpu_trial.stall("cpu", "") == {"seconds stopped": [0.3], "bytes": 0, "ms": 2.0, "ms while writing": 10.0}
    monkeypatch.setattr(gpu_trial, "logged", lambda *_: (rows, ""))
    assert "wrong" in gpu_trial.stall("cpu", "")


def test_the_list_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cuda", "--list", "--phase", "matches", "--only", "zero", "--output", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "matches: ZeRO-2, bf16 (<= 90 s)"
    assert os.listdir(tmp_path) == []
    assert missing(("json", "megatron_ext.errors")) == []
