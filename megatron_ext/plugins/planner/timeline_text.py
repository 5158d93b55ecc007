"""Draws a step of a pipeline as text for a terminal.

    stage 0 |0123    aa4bb5cc6dd7ee  ff  gg  hh|
    stage 1 | 0123 aa4bb5cc6dd7ee  ff  gg  hh  |

A column is a moment, and a digit the microbatch (its last digit) whose forward pass runs then; a letter is its
backward pass.
"""

from bisect import bisect_right
from collections.abc import Sequence

from megatron_ext.plugins.planner.timeline import COMMUNICATION, MESSAGES, Lane, Pass, Timeline, duration, size, summary

_FORWARD, _BACKWARD, _WEIGHTS = "0123456789", "abcdefghij", "ABCDEFGHIJ"

_BLOCKS = {COMMUNICATION: "-", MESSAGES: " ", "gradients": "=", "update": "+"}


_MOST_ROWS = 32


_COLOURS = {"forward": "\x1b[34m", "backward": "\x1b[33m", "block": "\x1b[31m"}


_PLAIN = "\x1b[0m"


COLOURS = (*_COLOURS.values(), _PLAIN)
"""Every escape sequence in the picture."""


_MEMORY_BAR = 24


def as_text(timeline: Timeline, width: int = 100, *, colour: bool = False) -> list[str]:
    """Return the lines of the picture: the stages against time, the meaning of the marks, and a table of the stages.

    Args:
        width: columns of the terminal.
        colour: whether to colour passes with escape sequences.
    """
    rows = _rows(timeline)
    margin = max(len(name) for name, _, _ in rows) + 2
    columns = _columns(timeline, max(width - margin - 2, 20))
    moments = [(column + 0.5) / columns * timeline.total for column in range(columns)]
    paint = _painted if colour else "".join
    lines = [timeline.title, "", f"{'':{margin}} {_phases(timeline, columns)}"]
    lines += [
        f"{name:<{margin}}|{paint([_mark(lane, wanted, moment) for moment in moments])}|" for name, lane, wanted in rows
    ]
    last = duration(timeline.total, timeline.unit)
    lines += [f"{'':{margin}} 0{last:>{columns - 1}}", "", *_legend(timeline), *timeline.notes, "", *summary(timeline)]
    return [line.rstrip() for line in [*lines, *_memory(timeline)]]


def _columns(timeline: Timeline, room: int) -> int:
    """Return the number of columns, with whole ones for the shortest pass where that wastes little: passes of equal
    time are then equally wide."""
    shortest = min((each.end - each.begin for lane in timeline.lanes for each in lane.passes), default=timeline.total)
    each = int(room * shortest / timeline.total + 1e-9) if timeline.total else 0
    whole = round(each * timeline.total / shortest) if shortest else 0
    return whole if whole and (not timeline.unit or whole > 0.8 * room) else room


def _rows(timeline: Timeline) -> list[tuple[str, Lane, int | None]]:
    """Return name, lane and chunk of every row; without a chunk a row shows all of them."""
    if timeline.chunks == 1 or len(timeline.lanes) * timeline.chunks > _MOST_ROWS:
        return [(lane.name, lane, None) for lane in timeline.lanes]
    return [
        (f"{lane.name}{f' chunk {chunk}':>{1 + len('chunk 0')}}", lane, chunk)
        for lane in timeline.lanes
        for chunk in range(timeline.chunks)
    ]


def _phases(timeline: Timeline, columns: int) -> str:
    """Return one line that says where the pipeline fills, is steady and drains, as far as the words have room."""
    scale = columns / timeline.total if timeline.total else 0.0
    bounds = [0, round(timeline.fill * scale), round(timeline.drain * scale), round(timeline.passes_end * scale)]
    text = ""
    for name, begin, end in zip(("fill", "steady state", "drain"), bounds, bounds[1:], strict=False):
        room = end - begin
        text += ("|" + name[: max(room - 1, 0)])[:room].ljust(room)
    return text


def _mark(lane: Lane, chunk: int | None, moment: float) -> str:
    block = next((block for block in lane.blocks if block.begin <= moment < block.end), None)
    shown = _at(lane.passes, moment)
    if shown is None:
        return _BLOCKS.get(block.name, "?") if block is not None and chunk in (None, 0) else " "
    if chunk is not None and shown.chunk != chunk:
        return " "
    if block is not None and block.name == COMMUNICATION:
        return _BLOCKS[COMMUNICATION]
    marks = _FORWARD if shown.forward else _WEIGHTS if shown.half == "weights" else _BACKWARD
    return marks[shown.microbatch % 10]


def _at(passes: Sequence[Pass], moment: float) -> Pass | None:
    index = bisect_right(passes, moment, key=lambda each: each.begin) - 1
    return passes[index] if index >= 0 and moment < passes[index].end else None


def _legend(timeline: Timeline) -> list[str]:
    blocks = {block.name for lane in timeline.lanes for block in lane.blocks}
    words = {
        COMMUNICATION: "- exposed communication",
        "gradients": "= gradients between ranks",
        "update": "+ update of the weights",
    }
    split = any(each.half for lane in timeline.lanes for each in lane.passes)
    weights = ", A-J the part of it for the weights" if split else ""
    marks = f"0-9 forward pass of that microbatch, a-j its backward pass{weights}, blank: the stage waits"
    others = ", ".join(text for name, text in words.items() if name in blocks)
    return [marks, *([others] if others else [])]


def _memory(timeline: Timeline) -> list[str]:
    """Return a bar for the memory of each stage: its peak against the peak of all stages, and the memory held all the
    time."""
    most = timeline.most_memory
    if not most:
        return []
    lines = ["", "memory (# at all times, + at most):"]
    margin = max(len(lane.name) for lane in timeline.lanes)
    for lane in timeline.lanes:
        if lane.peak is None:
            continue
        always = min(bytes_now for _, bytes_now in lane.memory)
        filled = [round(bytes_now / most * _MEMORY_BAR) for bytes_now in (always, lane.peak[1])]
        bar = "#" * filled[0] + "+" * (filled[1] - filled[0])
        lines.append(f"{lane.name:<{margin}}  {bar:<{_MEMORY_BAR}}  {size(always)} to {size(lane.peak[1])}")
    return lines


def _painted(marks: Sequence[str]) -> str:
    text, before = "", ""
    for mark in marks:
        colour = _colour(mark)
        if colour != before:
            text += (_PLAIN if before else "") + colour
            before = colour
        text += mark
    return text + (_PLAIN if before else "")


def _colour(mark: str) -> str:
    if mark == " ":
        return ""
    return _COLOURS["forward" if mark in _FORWARD else "backward" if mark in _BACKWARD + _WEIGHTS else "block"]
