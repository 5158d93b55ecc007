"""Draws a step of a pipeline as SVG, in the style of the run's page: stages against time, and each stage's memory.

The drawing has no script; the text under the pointer names a box, with its begin and end.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron_ext.plugins.pages.charts import label, page, picture, svg, ticks, wide
from megatron_ext.plugins.pages.markup import Content, Markup, element, joined
from megatron_ext.plugins.planner.timeline import COMMUNICATION, Block, Lane, Pass, Timeline, duration, size, summary

# In SVG units.
_WIDTH, _LEFT, _RIGHT, _TOP, _AXIS = 1120, 110, 84, 24, 28
_LANE, _GAP = 30, 6
_MEMORY = 40
_PALE = 0.7  # below, a number in the colour of the page cannot be read
_NARROW = 3  # of a box, whose border in the colour of the page would hide it
_WIDE_ENOUGH = 8  # of a box, for each digit of its number

STYLE = """
.wide svg { min-width: 720px; }
.wide pre { white-space: pre; overflow-x: auto; }
.lane { fill: var(--grid); fill-opacity: .45; }
.forward { fill: var(--first); } .backward { fill: var(--second); }
.pass { stroke: var(--page); stroke-width: .6; } .narrow { stroke-width: .15; }
.weights { fill: var(--third); } .block { fill: var(--ink); } .messages { fill-opacity: 0; }
.gradients { fill: var(--fourth); } .update { fill: var(--fifth); }
.number { fill: var(--page); font-size: 11px; text-anchor: middle; pointer-events: none; }
.number.pale { fill: var(--ink); } .key-of-box { white-space: nowrap; margin-right: 1em; }
.phase { stroke: var(--quiet); stroke-dasharray: 3 3; }
.memory { fill: var(--first); fill-opacity: .35; stroke: var(--first); stroke-width: 1; }
.swatch { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 0; vertical-align: -.05em; }
"""


def as_page(timeline: Timeline, remarks: Iterable[str] = ()) -> Markup:
    """Return the picture as a page of its own; `remarks` stand above it, the table of the stages, which is long where
    there are many, below."""
    below = wide("Stages", element("pre", "\n".join(summary(timeline))))
    return page(timeline.title, [*timeline.notes, *remarks], [as_section(timeline), below], style=STYLE)


def as_section(timeline: Timeline) -> Markup:
    """Return the picture as a part of a page, which has STYLE among its rules."""
    parts = [wide(["Stages against time ", _key(timeline)], _stages(timeline))]
    if timeline.most_memory:
        most = element("span", f"each up to {size(timeline.most_memory)}")
        parts.append(wide(["Memory of the stages ", most], _memories(timeline)))
    return joined(parts)


def as_picture(timeline: Timeline) -> Markup:
    """Return the stages against time as an SVG file."""
    entries = [(colour, text) for colour, opacity, text in _entries(timeline) if opacity == 1.0]
    key = [(f"\u25a0 {text}", f"of-{colour}") for colour, text in entries]
    rules = "".join(f".of-{colour} {{ color: var(--{colour}); }}\n" for colour, _ in entries)
    return _stages(timeline, functools.partial(picture, key=key, style=STYLE + rules))


def _key(timeline: Timeline) -> Markup:
    swatches = [
        [element("i", "", class_="swatch", style=f"background:var(--{colour});opacity:{opacity:.2f}"), text]
        for colour, opacity, text in _entries(timeline)
    ]
    return element("span", [element("span", each, class_="key-of-box") for each in swatches])


def _entries(timeline: Timeline) -> list[tuple[str, float, str]]:
    """Return the key: colour, opacity and text of each kind of box that there is."""
    names = {block.name for lane in timeline.lanes for block in lane.blocks}
    halves = {each.half for lane in timeline.lanes for each in lane.passes}
    kinds = [
        ("first", "forward"),
        ("second", "backward"),
        *([("third", "backward of the weights")] if "weights" in halves else []),
    ]
    entries = [(colour, 1.0, text) for colour, text in kinds]
    if timeline.chunks > 1:
        last = timeline.chunks - 1
        entries += [(colour, _opacity(timeline, last), f"{text}, chunk {last}") for colour, text in kinds[:2]]
    blocks = (
        ("ink", COMMUNICATION, "exposed communication"),
        ("fourth", "gradients", "gradients between ranks"),
        ("fifth", "update", "update of the weights"),
    )
    return [*entries, *((colour, 1.0, text) for colour, name, text in blocks if name in names)]


def _opacity(timeline: Timeline, chunk: int) -> float:
    return 1.0 - 0.6 * chunk / max(timeline.chunks, 1)


def _stages(timeline: Timeline, frame: Callable[..., Markup] = svg) -> Markup:
    height = len(timeline.lanes) * (_LANE + _GAP)
    parts: list[Content] = [*_phases(timeline, height)]
    for row, lane in enumerate(timeline.lanes):
        y = _TOP + row * (_LANE + _GAP)
        parts.append(label(_LEFT - 8, y + _LANE / 2 + 4, lane.name, "end"))
        parts.append(element("rect", class_="lane", x=_LEFT, y=y, width=_WIDTH - _LEFT - _RIGHT, height=_LANE))
        parts += [_pass(timeline, each, y) for each in lane.passes]
        parts += [_block(timeline, block, y) for block in lane.blocks]
        share = lane.worked / (timeline.passes_end or 1.0)
        parts.append(_behind(f"{share:.0%} works", y + _LANE / 2))
    return _drawing(timeline, timeline.title, parts, _TOP + height, frame)


def _memories(timeline: Timeline) -> Markup:
    each = _MEMORY + _GAP
    parts: list[Content] = []
    for row, lane in enumerate(timeline.lanes):
        bottom = _TOP + row * each + _MEMORY
        parts.append(label(_LEFT - 8, bottom - _MEMORY / 2 + 4, lane.name, "end"))
        parts.append(element("path", class_="grid", d=f"M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"))
        if lane.peak is not None:
            parts += [_area(timeline, lane, bottom), _behind(size(lane.peak[1]), bottom - _MEMORY / 2)]
    return _drawing(timeline, "memory of the stages", parts, _TOP + len(timeline.lanes) * each)


def _drawing(
    timeline: Timeline, name: str, parts: Sequence[Content], bottom: float, frame: Callable[..., Markup] = svg
) -> Markup:
    """Return the parts with the axis of time under them."""
    times = [
        label(
            f"{_x(timeline, second):.1f}",
            bottom + 16,
            duration(second, timeline.unit) if second else "0",
            "middle",
        )
        for second in ticks(0.0, timeline.total or 1.0, 8)
    ]
    return frame(_WIDTH, bottom + _AXIS, name, [[part, "\n"] for part in (*parts, *times)])


def _behind(text: str, y: float) -> Markup:
    """Return a text behind the row of a stage."""
    return element("text", text, x=_WIDTH - _RIGHT + 8, y=f"{y + 4:.1f}")


def _x(timeline: Timeline, second: float) -> float:
    return _LEFT + second / (timeline.total or 1.0) * (_WIDTH - _LEFT - _RIGHT)


def _phases(timeline: Timeline, height: float) -> Iterator[Markup]:
    """Yield names and borders of fill, steady state and drain."""
    spans = [("fill", 0.0, timeline.fill), ("steady state", timeline.fill, timeline.drain)]
    for name, begin, end in [*spans, ("drain", timeline.drain, timeline.passes_end)]:
        left, right = _x(timeline, begin), _x(timeline, end)
        if right - left < 1:
            continue
        if right - left > 7 * len(name):
            yield element("text", name, x=f"{(left + right) / 2:.1f}", y=_TOP - 9, text_anchor="middle")
        yield element("path", class_="phase", d=f"M{right:.1f} {_TOP - 6}V{_TOP + height}")


def _pass(timeline: Timeline, each: Pass, y: float) -> Markup:
    left, right = _x(timeline, each.begin), _x(timeline, each.end)
    kind = "forward" if each.forward else "backward"
    of_half = f" for the {each.half}" if each.half else ""
    opacity = _opacity(timeline, each.chunk)
    chunk = f", chunk {each.chunk}" if timeline.chunks > 1 else ""
    box = element(
        "rect",
        element("title", f"{kind} pass{of_half} of microbatch {each.microbatch}{chunk}: {_when(timeline, each)}"),
        class_=f"pass{' narrow' if right - left < _NARROW else ''} {each.half if each.half == 'weights' else kind}",
        x=f"{left:.2f}",
        y=y,
        width=f"{max(right - left, 0.3):.2f}",
        height=_LANE,
        fill_opacity=f"{opacity:.2f}",
    )
    number = str(each.microbatch)
    if right - left < _WIDE_ENOUGH * len(number):
        return box
    shade = "number" if opacity > _PALE else "number pale"
    return joined(
        box, element("text", number, class_=shade, x=f"{(left + right) / 2:.1f}", y=f"{y + _LANE / 2 + 4:.1f}")
    )


def _block(timeline: Timeline, block: Block, y: float) -> Markup:
    left, right = _x(timeline, block.begin), _x(timeline, block.end)
    return element(
        "rect",
        element("title", f"{block.name}: {_when(timeline, block)}"),
        class_=f"block {block.name}",
        x=f"{left:.2f}",
        y=y + _LANE - 7,
        width=f"{max(right - left, 0.2):.2f}",
        height=7,
    )


def _when(timeline: Timeline, each: Pass | Block) -> str:
    return f"{duration(each.begin, timeline.unit)} to {duration(each.end, timeline.unit)}"


def _area(timeline: Timeline, lane: Lane, bottom: float) -> Markup:
    """Return the memory of a stage as an area of steps."""
    most = timeline.most_memory
    # A recorded stage is first asked when its first pass ends: what it held before is not known.
    path = f"M{_x(timeline, lane.memory[0][0]):.2f} {bottom}"
    for second, bytes_now in lane.memory:
        height = _MEMORY * bytes_now / most
        path += f"H{_x(timeline, second):.2f}V{bottom - height:.2f}"
    path += f"H{_WIDTH - _RIGHT}V{bottom}Z"
    always = min(bytes_now for _, bytes_now in lane.memory)
    text = f"{lane.name}: {size(always)} at least, {size(lane.peak[1] if lane.peak else 0.0)} at most"
    return element("path", element("title", text), class_="memory", d=path)
