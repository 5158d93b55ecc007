"""In a notebook, text that takes the place of earlier text has a place of its own, with a bar. IPython is no package of
the tests: a stand-in has the two functions that are called (docs/python.md was run in a real kernel)."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from megatron_ext import terminal
from megatron_ext.telemetry.log_line import Console
from megatron_ext.terminal import bar, is_watched, keep_status, status, tracked


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


def test_a_text_takes_the_place_of_the_one_before(display: Display, capsys: pytest.CaptureFixture[str]) -> None:
    assert is_watched()
    status("step 1/2")
    status("step 2/2")
    keep_status()
    status("another\x1b")
    assert display.places == [["step 1/2", "step 2/2"], ["another\\x1b"]]
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
    assert display.places == [[f"step 3/3 {bar(1.0)}"]], "once a second at most, and at the end"
    assert capsys.readouterr().out == "trained  3 of 3 steps\n"


def test_long_work_shows_a_bar(display: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    monkeypatch.setattr(terminal.time, "monotonic", lambda: float(next(now)))
    assert list(tracked("writing", "abcd")) == list("abcd")
    [shown] = display.places
    assert shown[:-1] == [
        f"writing {bar(done / 4)} {done} of 4, 0:0{left} left" for done, left in ((1, 6), (2, 3), (3, 1))
    ]
    assert shown[-1] == ""
