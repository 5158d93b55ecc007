"""Numbers of a real run as text for Prometheus."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from megatron_ext.errors import ConfigurationError
from megatron_ext.plugins.pages.commands.prometheus import main
from megatron_ext.train.pretrain import pretrain
from tests.support.small_runs import MODEL

_LINE = re.compile(r"pretrain_[a-z_]+ (?:[-+]?\d[\d.e+-]*|NaN|[+-]Inf)")


def test_the_last_numbers_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pretrain([*MODEL, "--save", str(tmp_path), "--log-interval", "1"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    output = tmp_path / "pretrain.prom"
    (tmp_path / "exit.json").write_text(json.dumps({"code": 75}))
    assert main([str(tmp_path), "--output", str(output)]) == 0
    lines = output.read_text().splitlines()
    values = dict(line.split(" ") for line in lines if not line.startswith("#"))
    steps = [row for row in rows if "lm_loss" in row]
    assert float(values["pretrain_lm_loss"]) == steps[-1]["lm_loss"]
    assert (values["pretrain_iteration"], values["pretrain_exit_code"]) == ("3", "75")
    assert (
        float(values["pretrain_validation_loss"]) == [r for r in rows if "validation_loss" in r][-1]["validation_loss"]
    )
    for number in range(0, len(lines), 3):
        described, typed, value = lines[number : number + 3]
        name = value.split(" ")[0]
        assert described.startswith(f"# HELP {name} ")
        assert typed == f"# TYPE {name} gauge"
        assert _LINE.fullmatch(value), value
    capsys.readouterr()
    (tmp_path / "exit.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(
            '{"iteration": 4, "consumed_samples": 16, "save_failure": "full"}\n{"iteration": 4, "lm_loss": NaN, '
        )
        file.write('"consumed_tokens": 256}\n')
    assert main([str(tmp_path / "metrics.jsonl")]) == 0
    said = capsys.readouterr().out
    assert "\npretrain_save_failures 1\n" in f"\n{said}"
    assert "\npretrain_lm_loss NaN\n" in said
    assert "exit_code" not in said


ROW = json.dumps({"iteration": 1, "consumed_samples": 4, "consumed_tokens": 64, "lm_loss": 2.5}) + "\n"


def watching(*words: object) -> Thread:
    watch = Thread(target=main, args=([*map(str, words), "--every", "0.01"],))
    watch.start()
    return watch


def test_an_end_after_which_ranks_start_again_is_not_the_last(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It begins before the first row, and goes on after the end of an attempt until that of the run."""
    output, run = tmp_path / "pretrain.prom", tmp_path / "run"
    watch = watching(run, "--output", output)
    _until(lambda: "metrics.jsonl does not exist: it is waited for; where the run has" in capfd.readouterr().err)
    run.mkdir()
    (run / "exit.json").write_text(json.dumps({"code": 76}))
    (run / "metrics.jsonl").write_text(ROW)
    _until(lambda: "pretrain_exit_code 76\n" in output.read_text())
    (run / "exit.json").unlink()
    _goes_on_to_the_end(watch, run, output)


def test_the_end_of_an_earlier_run_is_not_this_ones(tmp_path: Path) -> None:
    """As where it is started with a run that goes on, whose ranks have not begun yet; metrics lie elsewhere."""
    output, run, metrics = tmp_path / "pretrain.prom", tmp_path / "run", tmp_path / "rows"
    run.mkdir()
    metrics.write_text(ROW)
    (run / "exit.json").write_text(json.dumps({"code": 75}))
    os.utime(run / "exit.json", (time.time() - 60, time.time() - 60))
    assert main([str(metrics), "--save", str(run), "--output", str(output)]) == 0
    assert "pretrain_exit_code 75\n" in output.read_text()
    watch = watching(metrics, "--save", run, "--output", output)
    _goes_on_to_the_end(watch, run, output)


def test_a_run_that_ends_without_a_row_is_not_waited_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    watch = watching(tmp_path, "--output", tmp_path / "pretrain.prom")
    _until(lambda: "it is waited for" in capfd.readouterr().err)
    (tmp_path / "exit.json").write_text(json.dumps({"code": 64}))
    watch.join(60)
    assert not watch.is_alive()


def _goes_on_to_the_end(watch: Thread, run: Path, output: Path) -> None:
    """See that a watch has no end by now, and has one when the run has."""
    _until(lambda: "exit_code" not in output.read_text())
    assert watch.is_alive()
    (run / "exit.json").write_text(json.dumps({"code": 0}))
    watch.join(60)
    assert not watch.is_alive()
    assert "pretrain_exit_code 0\n" in output.read_text()


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError):  # not written yet
            if holds():
                return
        time.sleep(0.01)
    raise AssertionError("it has not come about in 60 s")


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"metrics\.jsonl does not exist; name the folder that --save wrote"):
        main([str(tmp_path)])
    with pytest.raises(ConfigurationError, match="--every 5 needs --output FILE"):
        main([str(tmp_path), "--every", "5"])
