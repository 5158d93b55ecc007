"""How processes end under the real launcher: which rank has the last word."""

import json
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.launched import ROOT, end_all, start_python, start_torchrun
from tests.support.small_runs import WITHOUT_LENGTH
from tests.support.warm_python import warm_python

PROGRAM = ROOT / "tests/support/failing_rank.py"


def ours(output: str) -> list[str]:
    """The lines that ranks wrote: torchrun's begin otherwise, or are indented."""
    return [line for line in output.split("\n") if line.startswith("rank ")]


@dataclass(frozen=True)
class Ended:
    returncode: int
    output: str


def torchrun(how: str, save: Path, folder: Path) -> Ended:
    log = folder / "log"
    words = ["--standalone", "--nproc-per-node=2", str(PROGRAM), how, str(save)]
    process = start_torchrun(words, log, {"PYTHONPATH": str(ROOT), **warm_python(folder / "bin")})
    try:
        code = process.wait(90)
    finally:
        end_all(process)
    return Ended(code, log.read_text())


# The record in the shared folder is looked at below, too.
@pytest.mark.full
@pytest.mark.parametrize(
    "shared", [pytest.param(True, id="with --save", marks=pytest.mark.slow), pytest.param(False, id="without")]
)
def test_under_torchrun_the_failing_rank_has_the_last_word(tmp_path: Path, shared: bool):
    save = tmp_path if shared else Path("-")
    run = torchrun("numeric", save, tmp_path)
    assert run.returncode == 1
    assert ours(run.output) == ["rank 1: NaN in layer 3, iteration 5"], run.output
    assert run.output.count("rank 1: NaN in layer 3, iteration 5") == 2, "torchrun's summary repeats the cause"
    if shared:
        assert json.loads((tmp_path / "exit.json").read_text())["code"] == 70


@pytest.mark.slow  # test_kill_and_resume.py and test_hangs.py kill ranks, too
def test_under_torchrun_a_killed_rank_is_reported_by_the_other(tmp_path: Path):
    run = torchrun("kill", tmp_path, tmp_path)
    (line,) = ours(run.output)
    # The survivor may have gone on to the next step before it needed its peer.
    assert re.match(r"rank 0: another rank was lost at iteration [56], without a word why \(.*\)\. Look", line), line
    record = json.loads((tmp_path / "exit.json").read_text())
    assert (record["code"], record["rank"], record["message"]) == (76, 0, line)


@pytest.mark.full
def test_under_torchrun_rank_0_alone_tells_configuration_errors(tmp_path: Path):
    run = torchrun("configuration", Path("-"), tmp_path)
    assert ours(run.output) == [
        "rank 0: 1 problem in the configuration, named above; nothing was started. Change the flags and start again."
    ], run.output
    assert run.output.count("exitcode  : 64") == 1, "the other rank leaves the summary to it"
    *_, last, line, _ = run.output.split("\n")
    assert (last, {*line}) == ("  traceback : rank 0: --a 1: too small", {"="}), (
        "torchrun's summary ends with the problem"
    )


@pytest.mark.first("kill-137-rank 1: ended by SIGKILL")
@pytest.mark.parametrize(
    ("how", "code", "cause"),
    [
        ("configuration", 64, "rank 0: --a 1: too small"),
        ("numeric", 70, "rank 1: NaN in layer 3, iteration 5"),
        ("kill", 137, "rank 1: ended by SIGKILL"),
    ],
)
def test_under_our_launcher_the_cause_is_the_last_line_and_gives_the_exit_code(
    how: str, code: int, cause: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    words = ["megatron_ext", "torchrun", "--standalone", "--nproc-per-node=2", str(PROGRAM), how, "-"]
    process = start_python(["-m", *words], log, warm_python(tmp_path / "bin") | {"PYTHONPATH": str(ROOT)})
    try:
        assert process.wait(90) == code
    finally:
        end_all(process)
    lines = log.read_text().splitlines()
    assert lines[-1] == cause
    assert not any(line.startswith("Traceback") for line in lines)


@pytest.mark.full  # a training of two ranks
def test_under_our_launcher_a_run_that_sigterm_stops_ends_with_its_own_code(tmp_path: Path) -> None:
    """Its ranks save first; a launcher that starts it again must see that it can."""
    log, save = tmp_path / "log", tmp_path / "save"
    words = ["megatron_ext", "torchrun", "--standalone", "--nproc-per-node=2", str(ROOT / "pretrain_gpt.py")]
    flags = [
        *WITHOUT_LENGTH,
        "--train-iters",
        "100000",
        "--lr-warmup-iters",
        "1",
        "--log-interval",
        "1",
        "--save",
        str(save),
    ]
    process = start_python(["-m", *words, *flags], log, warm_python(tmp_path / "bin") | {"PYTHONPATH": str(ROOT)})
    try:
        end = time.monotonic() + 90
        while not (save / "metrics.jsonl").exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 75, log.read_text()
    finally:
        end_all(process)
    record = json.loads((save / "exit.json").read_text())
    assert record["code"] == 75
    assert log.read_text().splitlines()[-1] == record["message"]
    assert (save / "latest_checkpointed_iteration.txt").exists()
