"""benchmarks/gpu_session.py: limits, what is on the disk when, and that a failure stops nothing; no GPU."""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_facts, gpu_operations, gpu_peers, gpu_ranks, gpu_session, gpu_trial
from benchmarks.gpu_cases import (
    BACKENDS,
    GRAPHED,
    GRAPHS,
    LLAMA,
    MATCHES,
    PHASES,
    RANKS,
    SESSION,
    SMALL,
    SWITCHES,
    Case,
    cases,
    parts,
)
from benchmarks.gpu_session import Session
from megatron_ext.device.nccl_choice import VARIABLE
from megatron_ext.plugins.prove.cases import CASES
from megatron_ext.train.configure import configure

# Of the second tier: a tool for machines with GPUs.
pytestmark = pytest.mark.full

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
    for phase in ("matches", "ranks"):
        names = {case.name for case in found if case.phase == phase}
        assert {case.name for case in found if case.phase == phase and "einops" in case.needs} == {
            name for name in names if "ZeRO" in name
        }
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


@pytest.mark.parametrize(("backend", "variable"), [("nccl-legacy", "0"), ("nccl2", "1")])
def test_a_group_of_one_is_made_by_the_implementation_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, backend: str, variable: str
) -> None:
    """torch's own choice is another one than a run's: the first fact of a session would be about that."""
    asked: list[str | None] = []

    def made(*_given: Any, **_more: Any) -> None:
        asked.append(os.environ.get(VARIABLE))
        raise InterruptedError  # no GPU is here

    monkeypatch.setenv(VARIABLE, "")  # put back afterwards
    monkeypatch.setattr(torch.distributed, "init_process_group", made)
    assert backend in BACKENDS["cuda"]
    planned = next(case for case in cases("cuda") if case.name == f"group of one, {backend}")
    with pytest.raises(InterruptedError):
        gpu_facts.main(*planned.command[2:])
    assert asked == [variable]


def test_a_group_of_one_starts_and_ends(tmp_path: Path) -> None:
    given = ["--device", "cpu", "--phase", "facts", "--only", "group of one", "--output", str(tmp_path)]
    assert gpu_session.main(given) == 0
    (record,) = tmp_path.glob("*.jsonl")
    (row,) = map(json.loads, record.read_text().splitlines())
    assert (row["case"], row["figures"]) == ("group of one, gloo", {"backend": "gloo", "nccl": None})


def ranks_cases(device: str) -> list[Case]:
    return [case for case in cases(device) if case.phase == "ranks"]


def test_ranks_are_planned_by_what_they_tell() -> None:
    planned = ranks_cases("cuda")
    overlapped = [planned.pop(), planned.pop()]
    assert all("--tp-comm-overlap" in case.command[-1] and case.devices == 2 for case in overlapped)
    half = (len(planned) - 3) // 2
    assert all(case.devices == 1 for case in planned[:3]), "the single ranks, which all others are held against"
    legacy, other = planned[3 : 3 + half], planned[3 + half :]
    for backend, part in (("nccl-legacy", legacy), ("nccl2", other)):
        assert {case.command[3] for case in part} == {backend}
        assert [case.devices for case in part] == sorted(case.devices for case in part)
        assert {case.devices for case in part} == {2, 4, 8}
        assert [case.command[4] for case in part] == [*RANKS]
    assert {case.command[4] for case in planned[:3]} == {CASES[name].model for name in RANKS}
    assert all(case.alone and case.limit == 60.0 for case in planned)
    before = [case for case in cases("cuda") if case.phase != "ranks"]
    assert cases("cuda")[: len(before)] == before, "one GPU before several"
    assert {case.devices for case in before} == {1}


def test_each_way_of_communicating_is_planned() -> None:
    flags = [" ".join(CASES[name].flags) for name in RANKS]
    ways = ("--sequence-parallel", "--cp-comm-type p2p", "--cp-comm-type all_gather", "--cp-comm-type a2a", "zbv")
    ways += ("alltoall", "--use-torch-fsdp2", "optim_grads_params", "--overlap-param-gather", "virtual-pipeline-stage")
    assert [way for way in ways if not any(way in text for text in flags)] == []


@pytest.mark.parametrize(("devices", "unfit"), [(1, {2, 4, 8}), (2, {4, 8}), (4, {8}), (8, set())])
def test_what_needs_more_devices_is_listed_as_not_run(tmp_path: Path, devices: int, unfit: set[int]) -> None:
    program = (sys.executable, "-c", "")
    session = Session(tmp_path, "cpu", budget=120.0, devices=devices)
    session.run([replace(case, command=program) for case in ranks_cases("cpu")])
    not_run = {row["case"]: row["reason"] for row in rows(session) if row["status"] == "not run"}
    assert {case.name for case in ranks_cases("cpu") if case.devices in unfit} == {*not_run}
    assert all(reason.endswith(f"devices of {devices}") for reason in not_run.values())
    assert {row["status"] for row in rows(session) if row["case"] not in not_run} == {"passed"}


def test_a_machine_without_gpus_is_still_asked_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_session.count_devices("cuda") == 1
    monkeypatch.setattr(gpu_session.sys, "executable", "/bin/false")  # as where torch cannot be imported
    assert gpu_session.count_devices("cuda") == 1


def test_a_case_that_the_budget_cuts_short_is_not_wrong(tmp_path: Path) -> None:
    session = Session(tmp_path, "cpu", budget=11.0)
    session.run([case("long", "import time; time.sleep(60)", limit=60.0)])
    (row,) = rows(session)
    assert (row["status"], row["reason"]) == ("not run", "no time left")


def test_a_session_goes_on_where_the_last_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = Session(tmp_path, "cpu", budget=120.0)
    planned = [replace(case, command=(sys.executable, "-c", ""), needs=()) for case in ranks_cases("cpu")]
    first.run(planned)
    capsys.readouterr()
    list_what_is_left = ["--device", "cpu", "--phase", "ranks", "--output", str(tmp_path), "--list", "--go-on"]
    assert gpu_session.main(list_what_is_left) == 0
    left = capsys.readouterr().out.splitlines()
    part = {case.name: name for name, of_part in parts("cpu").items() for case in of_part if case.phase == "ranks"}
    assert left == [f"ranks: {case.name} (<= 60 s, --phase {part[case.name]})" for case in planned if case.devices > 1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_layouts_of_several_ranks_can_be_configured(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("megatron_ext.train.configure.shows_gpu", lambda: device == "cuda")
    started: set[int] = set()

    def metrics(_device: str, flags: str, ranks: int) -> tuple[list[dict[str, Any]], str]:
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        configure(["--device", device, *flags.split()])
        started.add(ranks)
        step = {"lm_loss": 6.0, "grad_norm": 1.0, "elapsed_ms": 8.0, **dict.fromkeys(medians)}
        return [step] * 20 + [{"validation_loss": 6.0}], ""

    medians = ("tokens_per_second", "tflops_per_gpu", "mfu", "peak_memory_bytes")

    monkeypatch.setattr(gpu_trial, "metrics", metrics)
    for case in ranks_cases(device):
        gpu_ranks.main(*case.command[2:])
    assert started == {1, 2, 4, 8}


def test_a_flag_without_effect_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that do not read each other's memory train as ever, and a time with the flag would be one without it."""
    said = "warning: --tp-comm-overlap changes nothing on rank 0 and its tensor-parallel ranks: no peer\n"
    rows = [{"lm_loss": 6.0, "grad_norm": 1.0, "elapsed_ms": 8.0, "tokens_per_second": 9.0, "tflops_per_gpu": None}]
    rows = [{**rows[0], "mfu": None, "peak_memory_bytes": 1}] * 30

    def metrics(_device: str, flags: str, ranks: int) -> tuple[list[dict[str, Any]], str]:
        return rows, said if "--tp-comm-overlap" in flags else ""

    monkeypatch.setattr(gpu_trial, "metrics", metrics)
    found = gpu_ranks.switched("cuda", "--sequence-parallel |--tp-comm-overlap")
    assert found["without effect"] == said.removeprefix("warning: ").strip()
    assert (found["off"], found["all steps"]) == (found["on"], 0.0)
    assert "without effect" not in gpu_ranks.switched("cuda", "--sequence-parallel |--bf16")


@pytest.mark.parametrize("what", ["lm_loss", "grad_norm", "validation_loss"])
@pytest.mark.parametrize("off", [1e-6, 1e-4, float("nan")])
def test_a_layout_with_another_curve_is_wrong(monkeypatch: pytest.MonkeyPatch, what: str, off: float) -> None:
    def metrics(_device: str, _flags: str, ranks: int) -> tuple[list[dict[str, Any]], str]:
        found = [{"lm_loss": 6.0, "grad_norm": 1.0} for _ in range(20)] + [{"validation_loss": 6.0}]
        found[-1 if what == "validation_loss" else 12][what] += off if ranks > 1 else 0.0
        return found, ""

    monkeypatch.setattr(gpu_trial, "metrics", metrics)
    found = gpu_ranks.several_ranks("cuda", "nccl2", "PP4 VPP2, untied")
    assert ("wrong" in found) == (off != 1e-6)
    if "wrong" in found:
        assert "--world-size 4" in found["the first tensor that differs"]
        assert "--nccl-backend nccl2" in found["the first tensor that differs"]


@pytest.mark.parametrize(("takes", "asked", "found"), [(0.2, {1}, 0.204), (0.01, {1, 20}, 0.0102)])
def test_short_calls_are_timed_many_at_a_time(takes: float, asked: set[int], found: float) -> None:
    """Reading this clock costs 4 microseconds."""
    seen: set[int] = set()

    def clock(call: Callable[[], Any], calls: int) -> float:
        seen.add(calls)
        for _ in range(calls):
            call()
        return 0.004 + calls * takes

    count: list[None] = []
    assert gpu_operations.median_milliseconds(lambda: count.append(None), clock) == pytest.approx(found)
    assert seen == asked
    assert len(count) == 13 * sum(asked)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_part_fits_a_session_by_its_limits(device: str) -> None:
    """None is left out, none is twice, and their order is that of the phases."""
    planned = parts(device)
    assert max(sum(case.limit for case in part) for part in planned.values()) <= SESSION == 570.0
    assert [case for part in planned.values() for case in part] == cases(device)
    if device == "cuda":
        assert {"facts", "smoke", "matches-1", "ranks-1", "switches-1", "peers"} <= {*planned}


def test_a_part_is_asked_for_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_session.main(["--phase", "matches-2", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == [
        f"matches: {case.name} (<= {case.limit:g} s, --phase matches-2)" for case in parts("cuda")["matches-2"]
    ]
    assert gpu_session.main(["--phase", "matches", "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len([case for case in cases("cuda") if case.phase == "matches"])


def test_the_page_shows_what_a_session_takes() -> None:
    """Its command, its parts, and how long all limits are; the README leads to it."""
    page = (ROOT / "docs/gpu.md").read_text()
    commands = re.findall(r"^python benchmarks/gpu_session.py (.+)$", page, re.MULTILINE)
    assert commands
    for words in commands:
        assert [*gpu_session._options(shlex.split(words)).phase] == [*PHASES], "one command runs all"
    named = set(re.findall(r"`--phase ([\w-]+)`", page))
    assert named
    assert named <= {*PHASES, *parts("cuda")}
    assert "limits together are\nunder five hours" in re.sub(r"\n +", "\n", page)
    assert 4.0 < sum(case.limit for case in cases("cuda")) / 3600.0 < 5.0
    assert "(docs/gpu.md)" in (ROOT / "README.md").read_text()
