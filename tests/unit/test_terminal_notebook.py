"""In a notebook, text that takes the place of earlier text has a place of its own, with a bar. IPython is no package of
the tests: a stand-in has the two functions that are called (docs/python.md was run in a real kernel)."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_ext import terminal
from megatron_ext.telemetry.log_line import Console
from megatron_ext.terminal import bar, is_watched, status, tracked


class Display:
    """Remembers what each place has shown."""

    def __init__(self) -> None:
        self.places: list[list[str]] = []

    def __call__(self, data: dict[str, str], *, raw: bool, display_id: bool) -> Any:
        assert raw
        assert display_id
        self.places.append([data["text/plain"]])
        shown = self.places[-1]
        return SimpleNamespace(update=lambda data, raw: shown.append(data["text/plain"]))


@pytest.fixture
def display(monkeypatch: pytest.MonkeyPatch) -> Display:
    made = Display()
    shell, displays = ModuleType("IPython"), ModuleType("IPython.display")
    vars(shell)["get_ipython"] = lambda: SimpleNamespace(kernel=True)
    vars(displays)["display"] = made
    monkeypatch.setitem(sys.modules, "IPython", shell)
    monkeypatch.setitem(sys.modules, "IPython.display", displays)
    monkeypatch.setattr(terminal._Status, "place", None)
    return made


def test_a_bar_has_its_share_of_full_blocks() -> None:
    assert [bar(done, 4) for done in (0.0, 0.5, 1.0, 2.0)] == ["░░░░", "██░░", "████", "████"]


def test_a_text_takes_the_place_of_the_one_before(display: Display, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_watched()
    status("step 1/2", done=0.5)
    status("step 2/2", done=1.0)
    status("another\x1b", done=0.1)
    assert display.places == [[f"{bar(0.5)} step 1/2", f"{bar(1.0)} step 2/2"], [f"{bar(0.1)} another\\x1b"]]
    status("")
    assert display.places[1][1:] == [""]
    assert capsys.readouterr().out == ""


def test_ipython_in_a_terminal_is_no_notebook(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    vars(sys.modules["IPython"])["get_ipython"] = lambda: SimpleNamespace()
    assert not is_watched()
    status("text")
    assert display.places == []


def test_the_log_of_a_run_is_short_and_its_bar_reaches_the_end(
    display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    console = Console(throughput=False)
    for iteration in range(1, 4):
        console.alive(iteration, 3)
    console.close()
    assert display.places == [[f"{bar(1.0)} step 3/3"]], "once a second at most, and at the end"
    assert capsys.readouterr().out == "trained  3 of 3 steps\n"


def test_long_work_shows_a_bar(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: float(next(now)))
    assert list(tracked("writing", "abcd")) == list("abcd")
    [shown] = display.places
    assert [text.partition(" ")[0].count("█") for text in shown[:-1]] == [8, 15, 22]
    assert shown[0].endswith("writing: 1 of 4, 0:06 left")
    assert shown[-1] == ""
