"""What a person sees: short lines and a banner; a reader that leaves; --help with a word."""

import dataclasses
import errno
import io
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ext import lost_output
from megatron_ext.config.parse.help_text import about
from megatron_ext.telemetry.banner import Begun, banner
from megatron_ext.telemetry.console import Console
from megatron_ext.telemetry.metrics import ValidationMetrics
from megatron_ext.telemetry.short_line import remaining, short_line
from tests.support.samples import step
from tests.support.small_models import LLAMA, small_config
from tests.support.warm_python import warm_python

ROOT = Path(__file__).resolve().parents[3]
TRAINING = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --position-embedding-type rope "
    "--mock-data --vocab-size 64 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --num-workers 0 --device cpu "
    "--log-interval 1 --eval-iters 1 --train-iters"
)


def test_the_short_line() -> None:
    assert short_line(step()) == "step  10/100   loss 9.8451       3,278 tokens/s   0:28 left"
    last = step(iteration=100, skipped_iterations=2, nan_iterations=1)
    assert short_line(last) == "step 100/100   loss 9.8451       3,278 tokens/s   done   2 skipped   1 NaN"
    evaluation = ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=1.5)
    assert short_line(evaluation) == "validation after step 10   loss 1.5000   perplexity 4.48"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0:00"),
        (59.6, "1:00"),
        (725, "12:05"),
        (12000, "3:20:00"),
        (42.5, "0:42"),
        (43.5, "0:44"),
        (3599.4, "59:59"),
        (3600, "1:00:00"),
        (86399, "23:59:59"),
        (86400, "1 day 0:00:00"),
        (86405, "1 day 0:00:05"),
        (2 * 86400, "2 days 0:00:00"),
        (2.6e5, "3 days 0:13:20"),
    ],
)
def test_remaining_time(seconds: float, text: str) -> None:
    assert remaining(seconds) == text


def test_the_last_step_is_done_and_the_one_before_is_not() -> None:
    assert short_line(step(iteration=99, elapsed_ms=1500.0)).endswith("   0:02 left")
    assert short_line(step(iteration=100)).endswith("   done")
    assert short_line(step(iteration=7, train_iters=9)).startswith("step 7/9   loss")
    assert "   1 skipped" in short_line(step(skipped_iterations=1))
    assert "NaN" not in short_line(step(skipped_iterations=1))
    assert short_line(step(nan_iterations=3)).endswith("left   3 NaN")


@pytest.mark.parametrize("throughput", [False, True])
def test_megatrons_line_has_the_throughput_only_where_it_is_asked_for(
    throughput: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Console(throughput=throughput, form="megatron").write(step())
    assert ("throughput per GPU (TFLOP/s/GPU): 41.7 |" in capsys.readouterr().out) == throughput


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("form", ["auto", "short", "megatron"])
def test_a_terminal_counts_where_the_form_is_left_open(
    form: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    Console(throughput=False, form=form).write(
        ValidationMetrics(iteration=10, consumed_samples=160, validation_loss=1.5)
    )
    short = form == "short" or (form == "auto" and is_terminal)
    assert capsys.readouterr().out.startswith("validation after step 10" if short else "-----")


@pytest.mark.parametrize(("form", "short"), [("auto", False), ("short", True), ("megatron", False)])
def test_lines_that_are_no_terminals_are_megatrons_unless_asked(
    form: str, short: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Console(throughput=False, form=form).write(step())
    assert capsys.readouterr().out.startswith("step" if short else " [")


def test_the_banner() -> None:
    config = small_config(
        LLAMA,
        {"world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"train_iters": 10},
    )
    begun = Begun("a device", "gloo", iteration=4, consumed_samples=16, own=("loss",), kernels="torch's")
    first, *lines = banner(config, begun).splitlines()
    assert first.startswith("megatron-ext ")
    assert lines == [
        "device  8 ranks on a device, gloo",
        "layout  TP 2 x PP 2 x CP 1 x DP 2",
        "model   156,224 parameters, 4 layers of width 64, fp32",
        "data    synthetic; 4 sequences of 16 tokens a step",
        "to go   384 tokens in 24 sequences after iteration 4",
        "own     loss",
        "kernels torch's",
    ]


PP = "pipeline_model_parallel_size"


@pytest.mark.parametrize(
    ("layout", "training", "name", "line"),
    [
        ({}, {}, "device", "1 rank on a device, gloo"),
        ({"world_size": 2}, {}, "device", "2 ranks on a device, gloo"),
        ({"world_size": 2}, {}, "layout", "TP 1 x PP 1 x CP 1 x DP 2"),
        ({"world_size": 4, "context_parallel_size": 2}, {}, "layout", "TP 1 x PP 1 x CP 2 x DP 2"),
        (
            {"world_size": 2, PP: 2, "num_virtual_stages_per_pipeline_rank": 2},
            {},
            "layout",
            "TP 1 x PP 2 in 2 chunks x CP 1 x DP 1",
        ),
        ({"world_size": 2, "expert_model_parallel_size": 2}, {}, "layout", "TP 1 x PP 1 x CP 1 x DP 2 x EP 2"),
        ({}, {"bf16": True}, "model", "156,224 parameters, 4 layers of width 64, bf16"),
        ({}, {"fp16": True}, "model", "156,224 parameters, 4 layers of width 64, fp16"),
        ({}, {"train_iters": 5}, "to go", "64 tokens in 4 sequences after iteration 4"),
        ({}, {"train_iters": 4}, "to go", "0 tokens in 0 sequences after iteration 4"),
        ({}, {"train_iters": 3}, "to go", "0 tokens in 0 sequences after iteration 4"),
        ({}, {"train_iters": None, "train_samples": 26}, "to go", "160 tokens in 10 sequences after iteration 4"),
    ],
)
def test_each_line_of_the_banner(layout: dict[str, int], training: dict[str, Any], name: str, line: str) -> None:
    config = small_config(LLAMA, {"world_size": 1} | layout, {"train_iters": 10} | training)
    begun = Begun("a device", "gloo", iteration=4, consumed_samples=16)
    found = {text[:8].rstrip(): text[8:] for text in banner(config, begun).splitlines()[1:]}
    assert found[name] == line
    assert list(found) == ["device", "layout", "model", "data", "to go"], "what there is not is left out"


def test_what_a_run_brings_and_chooses_has_a_line_each() -> None:
    config = small_config(LLAMA, {"world_size": 1}, {"train_iters": 2})
    for given, line in (
        ({"own": ("loss", "layer")}, "own     loss, layer"),
        ({"kernels": "of TE"}, "kernels of TE"),
        ({"attention": "flash"}, "attend  flash"),
    ):
        begun = Begun("a device", "gloo", iteration=0, consumed_samples=0, **given)  # pyright: ignore[reportArgumentType]
        *_, to_go, last = banner(config, begun).splitlines()
        assert (to_go, last) == ("to go   128 tokens in 8 sequences", line)


@pytest.mark.parametrize(
    ("paths", "train_paths", "source"),
    [
        (None, None, "synthetic"),
        (("a",), None, "a"),
        (("a", "b"), None, "a and 1 more"),
        (("0.3", "a", "0.3", "b", "0.4", "c"), None, "a and 2 more"),
        (None, ("d", "e"), "d and 1 more"),
    ],
)
def test_the_data_is_named_by_its_first_source(
    paths: tuple[str, ...] | None, train_paths: tuple[str, ...] | None, source: str
) -> None:
    config = small_config(LLAMA, {"world_size": 1}, {"train_iters": 2})
    data = dataclasses.replace(config.data, data_path=paths, train_data_path=train_paths)
    lines = banner(dataclasses.replace(config, data=data), Begun("a device", "gloo", 0, 0)).splitlines()
    assert f"data    {source}; 4 sequences of 16 tokens a step" in lines


def program(*words: str, python: str = sys.executable, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([python, *words], cwd=ROOT, env=environment, text=True, **options)  # pyright: ignore[reportCallIssue, reportArgumentType, reportReturnType]


def test_a_terminal_shows_a_banner_and_short_lines(tmp_path: Path) -> None:
    ours, its = pty.openpty()
    python = warm_python(tmp_path)["PYTHON_EXEC"]
    training = program("pretrain_gpt.py", *TRAINING.split(), "2", python=python, stdout=its, stderr=its)
    os.close(its)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # how a terminal says that nobody writes to it any more
        pass
    lines = shown.decode().splitlines()
    assert training.wait() == 0, lines
    os.close(ours)
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split("   ")[0] for line in steps] == ["step 1/2", "step 2/2"]
    assert "layout  TP 1 x PP 1 x CP 1 x DP 1" in lines
    assert not [line for line in lines if "consumed samples" in line]


def head(command: list[str], python: str) -> tuple[str, str, int]:
    """The first line, as `| head -1` reads it, what is said on the standard error output, and the exit code."""
    running = program(*command, python=python, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stderr is not None
    line = running.stdout.readline()
    running.stdout.close()
    return line, running.stderr.read(), running.wait()


def test_a_training_goes_on_without_its_reader(tmp_path: Path) -> None:
    """Each of its lines is written at once, so that the second finds the pipe closed."""
    training = ["pretrain_gpt.py", *TRAINING.split(), "4", "--metrics-file", str(tmp_path / "metrics")]
    line, errors, code = head(training, warm_python(tmp_path)["PYTHON_EXEC"])
    assert (line[:12], errors, code) == ("megatron-ext", "", 0)
    assert '"iteration": 4' in (tmp_path / "metrics").read_text().splitlines()[-1]


def test_a_training_goes_on_where_its_log_has_no_room(tmp_path: Path) -> None:
    metrics, python = tmp_path / "metrics", warm_python(tmp_path)["PYTHON_EXEC"]
    words = ["pretrain_gpt.py", *TRAINING.split(), "4", "--metrics-file", str(metrics)]
    with open("/dev/full", "w") as full:
        assert program(*words, python=python, stdout=full, stderr=full).wait() == 0
    assert '"iteration": 4' in metrics.read_text().splitlines()[-1]


def test_a_training_goes_on_without_its_terminal(tmp_path: Path) -> None:
    """As one that `nohup` or `setsid` has started."""
    metrics, python = tmp_path / "metrics", warm_python(tmp_path)["PYTHON_EXEC"]
    ours, its = pty.openpty()
    words = ["pretrain_gpt.py", *TRAINING.split(), "4", "--metrics-file", str(metrics)]
    training = program(*words, python=python, stdout=its, stderr=its)
    os.close(its)
    os.read(ours, 1)
    os.close(ours)
    assert training.wait() == 0
    assert '"iteration": 4' in metrics.read_text().splitlines()[-1]


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_what_is_said_to_nobody_goes_nowhere_from_then_on(number: int, tmp_path: Path) -> None:
    """The end of a pipe, and a terminal that is gone."""

    class Left(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(number, os.strerror(number))

        def fileno(self) -> int:
            return file.fileno()

    with (tmp_path / "was").open("w") as file:
        stream = lost_output._Lasting(Left())
        assert stream.write("said") == 4
        os.write(file.fileno(), b"what the stream still holds")
    assert (tmp_path / "was").read_text() == ""


@pytest.mark.parametrize("full", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_what_finds_no_room_is_said_when_there_is_some(full: int) -> None:
    class Disk(io.StringIO):
        error: int | None = full

        def write(self, text: str) -> int:
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
            return super().write(text)

    disk: Any = Disk()
    stream = lost_output._Lasting(disk)
    stream.write("lost ")
    disk.error = None
    stream.write("said")
    assert disk.getvalue() == "said"
    disk.error = errno.EBADF
    with pytest.raises(OSError, match="descriptor"):
        stream.write("of another kind")


@pytest.mark.parametrize(
    "command",
    [
        ["pretrain_gpt.py", "--help"],
        ["pretrain_gpt.py", "--version"],
        ["-m", "megatron_ext", "--help"],
        ["-m", "megatron_ext", "preprocess", "--help"],
        ["tools/plan.py", "--help"],
        ["tools/prepare_cache.py", "--help"],
    ],
)
def test_no_program_ends_in_a_traceback_when_its_reader_leaves(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # so that the first byte finds nobody
    running = program(*command, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert running.stderr is not None
    assert running.stderr.read() == ""
    assert running.wait() in (0, 141)


def test_help_with_a_word_names_what_speaks_of_it() -> None:
    text = about("rope")
    assert "--rope-scaling-factor X" in text
    assert "--position-embedding-type" in text  # by its choices
    assert "--num-layers " not in text
    assert about("gloabl-batch") == (
        "no flag speaks of 'gloabl-batch'; near it: --global-batch-size, --eval-global-batch-size. "
        "--help lists all of them."
    )
    ended = program("pretrain_gpt.py", "--help", "rope", stdout=subprocess.PIPE)
    assert ended.communicate()[0] == text + "\n"
