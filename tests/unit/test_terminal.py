"""What reaches a terminal: one module prints, and in what it prints control characters are written out."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.plan.simulated_timeline import equal_stages
from megatron_ext.plan.timeline import COLOURS, as_text
from megatron_ext.terminal import note, printable, say, tracked, warn
from tests.support.syntax import nodes_of, source

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


def test_long_work_has_the_last_line_of_a_terminal_until_it_is_done() -> None:
    ours, its = os.openpty()
    with subprocess.Popen([sys.executable, "-c", WORK], stdout=its, stderr=subprocess.PIPE, cwd=PACKAGE.parent) as work:
        assert work.stderr is not None
        assert work.stderr.read() == b""
        assert work.wait(60) == 0
    os.close(its)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    for done in (1, 2, 3):
        assert f"\r\x1b[Kwork: {done} of 4, 0:0" in shown
    assert shown.endswith("\x1b[Kdone\r\n")
