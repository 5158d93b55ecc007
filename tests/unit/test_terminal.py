"""What reaches a terminal: one module prints, control characters are written out, and a program outlives its reader."""

import ast
import errno
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ext.plugins.planner.simulated_timeline import equal_stages
from megatron_ext.plugins.planner.timeline_text import COLOURS, as_text
from megatron_ext.terminal import bar, heading, note, printable, say, survive_lost_output, tracked, warn
from tests.support.syntax import nodes_of, source
from tests.support.warm_python import warm_python

PACKAGE = Path(__file__).parents[2] / "megatron_ext"


def prints(text: str) -> list[str]:
    """The calls of a source that write to a terminal by themselves."""
    calls = [ast.unparse(node.func) for node in nodes_of(text) if isinstance(node, ast.Call)]
    return [name for name in calls if name in ("print", "sys.stdout.write", "sys.stderr.write", "pprint")]


def test_nothing_but_one_module_prints() -> None:
    found = {str(path): prints(source(path)) for path in PACKAGE.rglob("*.py") if path.name != "terminal.py"}
    others = {name: calls for name, calls in found.items() if calls}
    assert not others, f"use megatron_ext.terminal.say, note or warn: {others}"
    assert prints("print('a')")
    assert prints("sys.stderr.write('a')")


def test_every_way_to_print_writes_control_characters_out(capsys: pytest.CaptureFixture[str]) -> None:
    say("a\x1b[2J\r\x9b", end="|\n")
    note("b\x1b[2J\n\tc")
    warn("d\x08")
    said = capsys.readouterr()
    assert said.out == "a\\x1b[2J\\r\\x9b|\n"
    assert said.err == "b\\x1b[2J\n\tc\nwarning: d\\x08\n"


@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, True), ({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)],
)
def test_a_terminal_shows_colours_unless_it_is_asked_not_to(
    variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    heading("part \x1b[2J")
    warn("what")
    note("error: what")
    said = capsys.readouterr()
    if coloured:
        assert said.out == "\x1b[1mpart \\x1b[2J\x1b[0m\n"
        assert said.err == "\x1b[33mwarning:\x1b[0m what\n\x1b[31merror:\x1b[0m what\n"
    else:
        assert (said.out, said.err) == ("part \\x1b[2J\n", "warning: what\nerror: what\n")


def test_nothing_but_a_terminal_gets_colours(capsys: pytest.CaptureFixture[str]) -> None:
    heading("part")
    warn("what")
    assert tuple(capsys.readouterr()) == ("part\n", "warning: what\n")


@pytest.mark.parametrize(("share", "shown"), [(-1.0, 0), (0.0, 0), (0.5, 12), (1.0, 24), (7.0, 24)])
def test_a_bar_is_filled_by_the_share_that_is_done(share: float, shown: int) -> None:
    assert bar(share) == f"[{'#' * shown:-<24}]"


def test_only_the_colours_of_a_picture_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    lines = as_text(equal_stages(2, 1, 4), colour=True)
    say("\n".join([*lines, "\x1b[2J\x1b[35m"]), colours=COLOURS)
    assert capsys.readouterr().out == "\n".join([*lines, "\\x1b[2J\\x1b[35m\n"])


@pytest.mark.parametrize("text", ["漢字\u3000かな", "10\xa0000", "👩\u200d🚀", "نمی\u200cخواهم"])
def test_what_is_to_be_read_stays(text: str) -> None:
    """Spaces of other scripts and joiners are no control characters."""
    assert printable(text) == text


def test_long_work_says_in_a_file_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(tracked("short work", range(1000))) == list(range(1000))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("megatron_ext.terminal._EACH_FILE", 0.0)
    assert list(tracked("work", ["a", "b", "c"])) == ["a", "b", "c"]
    assert capsys.readouterr() == ("", "work: 1 of 3, 0:00 left\nwork: 2 of 3, 0:00 left\n")


WORK = """
import time
from megatron_ext.terminal import say, tracked
for _ in tracked("work", range(4)):
    time.sleep(1.1)
say("done")
"""


@pytest.mark.full
def test_long_work_has_the_last_line_of_a_terminal_until_it_is_done() -> None:
    ours, its = os.openpty()
    with subprocess.Popen([sys.executable, "-c", WORK], stdout=its, stderr=subprocess.PIPE, cwd=PACKAGE.parent) as work:
        assert work.stderr is not None
        assert work.stderr.read() == b""
        assert work.wait(60) == 0
    os.close(its)
    shown = ""
    while not shown.endswith("done\r\n"):  # a terminal gives what has come, however little
        shown += os.read(ours, 10_000).decode()
    os.close(ours)
    for done in (1, 2, 3):
        assert f"\r\x1b[Kwork [{6 * done * '#':-<24}] {done} of 4, 0:0" in shown
    assert shown.endswith("\x1b[Kdone\r\n")


ROOT = Path(__file__).resolve().parents[2]


TRAINING = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --position-embedding-type rope "
    "--mock-data --vocab-size 64 --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --num-workers 0 --device cpu "
    "--log-interval 1 --eval-iters 1 --train-iters"
)


def program(*words: str, python: str = sys.executable, **options: object) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([python, *words], cwd=ROOT, env=environment, text=True, **options)  # pyright: ignore[reportCallIssue, reportArgumentType, reportReturnType]


def head(command: list[str], python: str) -> tuple[str, str, int]:
    """The first line, as `| head -1` reads it, what is said on the standard error output, and the exit code."""
    running = program(*command, python=python, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert running.stdout is not None
    assert running.stderr is not None
    line = running.stdout.readline()
    running.stdout.close()
    return line, running.stderr.read(), running.wait()


@pytest.mark.full
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


class _Stream:
    """A stream over a file, whose writes fail as it is told."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.failure: int | None = None
        self.written: list[str] = []

    def _fail(self) -> None:
        if self.failure is not None:
            raise OSError(self.failure, "failed")

    def write(self, text: str) -> int:
        self._fail()
        self.written.append(text)
        return 100 + len(text)

    def flush(self) -> None:
        self._fail()

    def fileno(self) -> int:
        return self.descriptor


@pytest.fixture(params=["stdout", "stderr"])
def stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[_Stream]:
    """One of the two outputs, as it is below what survives."""
    descriptor = os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT)
    below = _Stream(descriptor)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, below if name == request.param else _Stream(-1))
    survive_lost_output()
    monkeypatch.setattr(below, "lasting", getattr(sys, request.param), raising=False)
    yield below
    os.close(descriptor)


def _goes_to(stream: _Stream) -> str:
    return Path(os.readlink(f"/proc/self/fd/{stream.descriptor}")).name


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
@pytest.mark.parametrize("call", ["write", "flush"])
def test_output_that_is_closed_goes_nowhere(call: str, number: int, stream: _Stream) -> None:
    lasting = stream.lasting  # pyright: ignore[reportAttributeAccessIssue]
    stream.failure = number
    assert (lasting.write("text") if call == "write" else lasting.flush()) == (4 if call == "write" else None)
    assert _goes_to(stream) == "null"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_waited_for(number: int, stream: _Stream) -> None:
    lasting = stream.lasting  # pyright: ignore[reportAttributeAccessIssue]
    stream.failure = number
    assert lasting.write("lost") == 4
    assert lasting.flush() is None
    stream.failure = None
    assert lasting.write("kept") == 104
    lasting.writelines(["and", "more"])
    lasting.flush()
    assert (stream.written, _goes_to(stream)) == (["kept", "and", "more"], "output")


@pytest.mark.parametrize("call", ["write", "flush"])
def test_another_failure_is_told(call: str, stream: _Stream) -> None:
    lasting = stream.lasting  # pyright: ignore[reportAttributeAccessIssue]
    stream.failure = errno.EBADF
    with pytest.raises(OSError, match="failed"):
        lasting.write("text") if call == "write" else lasting.flush()
    assert _goes_to(stream) == "output"
