"""Draws a step of a pipeline as SVG, in the style of the run's page: stages against time, and each stage's memory.

The drawing has no script; the text under the pointer says what a box is, from when to when.
"""

import html
from collections.abc import Iterable

from megatron_ext.charts import page, ticks
from megatron_ext.plan.timeline import Block, Lane, Pass, Timeline, duration, size, summary

# In SVG units.
_WIDTH, _LEFT, _RIGHT, _TOP, _AXIS = 1120, 110, 84, 24, 28
_LANE, _GAP = 30, 6
_MEMORY = 40
_PALE = 0.7  # below, a number in the colour of the page cannot be read
_NARROW = 3  # of a box, whose border in the colour of the page would hide it
_WIDE_ENOUGH = 8  # of a box, for each digit of its number

STYLE = """
.wide { max-width: 1180px; margin: 2rem 0; overflow-x: auto; }
.wide svg { min-width: 720px; }
.wide pre { white-space: pre; overflow-x: auto; }
.lane { fill: var(--grid); fill-opacity: .45; }
.forward { fill: var(--first); } .backward { fill: var(--second); }
.pass { stroke: var(--page); stroke-width: .6; } .narrow { stroke-width: .15; }
.block { fill: var(--ink); fill-opacity: .55; } .messages { fill-opacity: 0; } .gradients { fill-opacity: .4; }
.update { fill-opacity: .2; }
.number { fill: var(--page); font-size: 11px; text-anchor: middle; pointer-events: none; }
.number.pale { fill: var(--ink); } .key-of-box { white-space: nowrap; }
.phase { stroke: var(--quiet); stroke-dasharray: 3 3; }
.memory { fill: var(--first); fill-opacity: .35; stroke: var(--first); stroke-width: 1; }
.swatch { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; vertical-align: -.05em; }
"""


def as_page(timeline: Timeline, remarks: Iterable[str] = ()) -> str:
    """Return the picture as a page of its own; `remarks` stand above it, the table of the stages, which is long where
    there are many, below."""
    table = html.escape("\n".join(summary(timeline)))
    below = f'<section class="wide">\n<h2>Stages</h2>\n<pre>{table}</pre>\n</section>\n'
    return page(timeline.title, [*timeline.notes, *remarks], as_section(timeline) + below, style=STYLE)


def as_section(timeline: Timeline) -> str:
    """Return the picture as a part of a page, which has STYLE among its rules."""
    parts = [f'<section class="wide">\n<h2>Stages against time {_key(timeline)}</h2>\n{_stages(timeline)}</section>\n']
    if timeline.most_memory:
        most = size(timeline.most_memory)
        heading = f"Memory of the stages <span>each up to {most}</span>"
        parts.append(f'<section class="wide">\n<h2>{heading}</h2>\n{_memories(timeline)}</section>\n')
    return "".join(parts)


def _key(timeline: Timeline) -> str:
    names = {block.name for lane in timeline.lanes for block in lane.blocks}
    words = [("forward", "first"), ("backward", "second")]
    keys = [f'<i class="swatch" style="background:var(--{colour})"></i>{word}' for word, colour in words]
    texts = {"communication": "exposed communication", "gradients": "gradients", "update": "update"}
    shades = {"communication": 0.55, "gradients": 0.4, "update": 0.2}
    keys += [
        f'<i class="swatch" style="background:var(--ink);opacity:{shades[name]}"></i>{text}'
        for name, text in texts.items()
        if name in names
    ]
    if timeline.chunks > 1:
        pale = '<i class="swatch" style="background:var(--{colour});opacity:.5"></i>'
        keys.append(f"{pale.format(colour='first')}{pale.format(colour='second')}a later chunk")
    return f"<span>{''.join(f'<span class="key-of-box">{key}</span>' for key in keys)}</span>"


def _stages(timeline: Timeline) -> str:
    height = len(timeline.lanes) * (_LANE + _GAP)
    parts = [_open(_TOP + height + _AXIS, timeline.title), *_phases(timeline, height)]
    for row, lane in enumerate(timeline.lanes):
        y = _TOP + row * (_LANE + _GAP)
        parts.append(_name(lane, y + _LANE / 2))
        parts.append(f'<rect class="lane" x="{_LEFT}" y="{y}" width="{_WIDTH - _LEFT - _RIGHT}" height="{_LANE}"/>')
        parts += [_pass(timeline, each, y) for each in lane.passes]
        parts += [_block(timeline, block, y) for block in lane.blocks]
        share = lane.worked / (timeline.passes_end or 1.0)
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{y + _LANE / 2 + 4:.1f}">{share:.0%} works</text>')
    return "\n".join([*parts, *_axis(timeline, _TOP + height), "</svg>", ""])


def _memories(timeline: Timeline) -> str:
    each = _MEMORY + _GAP
    height = len(timeline.lanes) * each
    parts = [_open(_TOP + height + _AXIS, "memory of the stages")]
    for row, lane in enumerate(timeline.lanes):
        bottom = _TOP + row * each + _MEMORY
        parts.append(_name(lane, bottom - _MEMORY / 2))
        parts.append(f'<path class="grid" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"/>')
        if lane.peak is None:
            continue
        parts.append(_area(timeline, lane, bottom))
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{bottom - _MEMORY / 2 + 4:.1f}">{size(lane.peak[1])}</text>')
    return "\n".join([*parts, *_axis(timeline, _TOP + height), "</svg>", ""])


def _open(height: float, label: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{html.escape(label, quote=True)}">'


def _name(lane: Lane, y: float) -> str:
    return f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{html.escape(lane.name)}</text>'


def _x(timeline: Timeline, second: float) -> float:
    return _LEFT + second / (timeline.total or 1.0) * (_WIDTH - _LEFT - _RIGHT)


def _phases(timeline: Timeline, height: float) -> list[str]:
    """Return names and borders of fill, steady state and drain."""
    parts = []
    spans = [("fill", 0.0, timeline.fill), ("steady state", timeline.fill, timeline.drain)]
    for name, begin, end in [*spans, ("drain", timeline.drain, timeline.passes_end)]:
        left, right = _x(timeline, begin), _x(timeline, end)
        if right - left < 1:
            continue
        if right - left > 7 * len(name):
            parts.append(f'<text x="{(left + right) / 2:.1f}" y="{_TOP - 9}" text-anchor="middle">{name}</text>')
        parts.append(f'<path class="phase" d="M{right:.1f} {_TOP - 6}V{_TOP + height}"/>')
    return parts


def _pass(timeline: Timeline, each: Pass, y: float) -> str:
    left, right = _x(timeline, each.begin), _x(timeline, each.end)
    kind = "forward" if each.forward else "backward"
    shape = "pass narrow" if right - left < _NARROW else "pass"
    opacity = 1.0 - 0.6 * each.chunk / max(timeline.chunks, 1)
    chunk = f", chunk {each.chunk}" if timeline.chunks > 1 else ""
    when = f"{duration(each.begin, timeline.unit)} to {duration(each.end, timeline.unit)}"
    box = (
        f'<rect class="{shape} {kind}" x="{left:.2f}" y="{y}" width="{max(right - left, 0.3):.2f}" height="{_LANE}" '
        f'fill-opacity="{opacity:.2f}"><title>{kind} pass of microbatch {each.microbatch}{chunk}: {when}</title></rect>'
    )
    number = str(each.microbatch)
    if right - left < _WIDE_ENOUGH * len(number):
        return box
    shade = "number" if opacity > _PALE else "number pale"
    return box + f'<text class="{shade}" x="{(left + right) / 2:.1f}" y="{y + _LANE / 2 + 4:.1f}">{number}</text>'


def _block(timeline: Timeline, block: Block, y: float) -> str:
    left, right = _x(timeline, block.begin), _x(timeline, block.end)
    when = f"{duration(block.begin, timeline.unit)} to {duration(block.end, timeline.unit)}"
    return (
        f'<rect class="block {block.name}" x="{left:.2f}" y="{y + _LANE - 7}" width="{max(right - left, 0.2):.2f}" '
        f'height="7"><title>{block.name}: {when}</title></rect>'
    )


def _area(timeline: Timeline, lane: Lane, bottom: float) -> str:
    """Return the memory of a stage as an area of steps."""
    most = timeline.most_memory
    # A recorded stage is first asked when its first pass ends: what it held before is not known.
    path = f"M{_x(timeline, lane.memory[0][0]):.2f} {bottom}"
    for second, held in lane.memory:
        height = _MEMORY * held / most
        path += f"H{_x(timeline, second):.2f}V{bottom - height:.2f}"
    path += f"H{_WIDTH - _RIGHT}V{bottom}Z"
    always = min(held for _, held in lane.memory)
    text = f"{lane.name}: {size(always)} at least, {size(lane.peak[1] if lane.peak else 0.0)} at most"
    return f'<path class="memory" d="{path}"><title>{html.escape(text)}</title></path>'


def _axis(timeline: Timeline, y: float) -> list[str]:
    return [
        f'<text x="{_x(timeline, second):.1f}" y="{y + 16:.1f}" text-anchor="middle">'
        f"{duration(second, timeline.unit) if second else 0}</text>"
        for second in ticks(0.0, timeline.total or 1.0, 8)
    ]
