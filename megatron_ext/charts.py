"""Draws charts as SVG, and the HTML page that they stand on.

A page needs nothing else, neither scripts nor a network, and follows the reader's light or dark setting.
"""

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Point = tuple[int, float]

# The drawing of one chart, in SVG units.
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 12, 30
_MOST_POINTS = 600

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --ink: #1d1f23; --quiet: #63666d; --grid: #e2e3e5;
        --first: #1f66b5; --second: #bd4f0a; }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #e8e9eb; --quiet: #9a9da4; --grid: #30333a; --first: #70aef5; --second: #f79a56; } }
body { margin: 2rem auto; max-width: 1180px; padding: 0 1rem; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 0 0 .25rem; }
h2 span { font-weight: normal; color: var(--quiet); }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; margin: 0 0 1.5rem; }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 2rem; }
section { margin: 0; }
svg { width: 100%; height: auto; display: block; }
text { fill: var(--quiet); font-size: 12px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--grid); }
.line { fill: none; stroke: var(--first); stroke-width: 1.6; stroke-linejoin: round; }
.second { stroke: var(--second); }
.dot { fill: var(--first); } .dot.second { fill: var(--second); stroke: var(--page); }
.key { font-weight: normal; color: var(--first); } .key.second { color: var(--second); }
.hit { fill: transparent; } .hit:hover { fill: var(--quiet); fill-opacity: .25; }
"""


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    points: Sequence[Point]
    name: str = ""
    """Name in the key, and in the text under the pointer; without one it is not in the key."""

    dotted: bool = False
    """Whether it is drawn with its points, in the second colour."""

    style: str = ""
    """A class of its own for the line and the key, for one of many."""


@dataclass(frozen=True)
class _Axes:
    """Maps data to the drawing; the ranges are never empty."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    doublings: bool = False
    """Whether equal distances along x are equal ratios; all x are above 0 then."""

    @classmethod
    def around(cls, points: Sequence[Point], *, doublings: bool) -> "_Axes":
        xs, ys = [float(x) for x, _ in points], [y for _, y in points]
        low, high = min(ys), max(ys)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(min(xs), max(max(xs), min(xs) + 1), low - room, high + room, doublings)

    def x(self, value: float) -> float:
        low, high = self.x_low, self.x_high
        if self.doublings:
            value, low, high = math.log2(value), math.log2(low), math.log2(high)
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)


def page(title: str, lines: Iterable[str], body: str, *, style: str = "") -> str:
    """Return a page as text.

    Args:
        title: its heading.
        lines: what stands under it.
        body: the rest, as HTML.
        style: further rules of style.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}{style}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<pre>{html.escape(chr(10).join(lines))}</pre>\n{body}</body>\n</html>\n"
    )


def chart(name: str, unit: str, series: Sequence[Series], *, along: str, doublings: bool = False) -> str:
    """Return one chart as HTML: a line for each series, with a key where there are several.

    Args:
        along: what the horizontal axis counts, in the singular.
        doublings: whether it counts in doublings, from 1 upwards, with a tick at each x that the data has.
    """
    heading = f"{name} <span>{unit}{' by ' + along if doublings else ''}</span>"
    if len(series) > 1:
        keys = [
            f'<span class="{_classes("key", each)}">{"&#9679;" if each.dotted else "&#9472;"} '
            f"{html.escape(each.name)}</span>"
            for each in series
            if each.name
        ]
        heading += " " + " ".join(keys)
    shown = finite(point for each in series for point in each.points)
    body = "<p>Nothing to show.</p>"
    if shown:
        axes = _Axes.around(shown, doublings=doublings)
        marks = _grid(axes, along, sorted({x for x, _ in shown}))
        marks += "".join(_line(axes, each.points, _classes("line", each)) for each in series)
        for each in series:
            shown = finite(each.points)
            marks += _dots(axes, shown, along, each.name) if each.dotted else _hits(axes, shown, along)
        body = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name} by {along}">\n{marks}</svg>'
    return f"<section>\n<h2>{heading}</h2>\n{body}\n</section>\n"


def _classes(kind: str, series: Series) -> str:
    return " ".join(filter(None, (kind, "second" if series.dotted else "", series.style)))


def finite(points: Iterable[Point]) -> list[Point]:
    """Return the points whose value is finite."""
    return [(x, value) for x, value in points if math.isfinite(value)]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) between low and high."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    # From a multiple, not by adding up, so that 0.3 is not 0.30000000000000004.
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _grid(axes: _Axes, along: str, xs: Sequence[float]) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT - 8}" y="{bottom + 20}" text-anchor="end">{along}</text>'] if not axes.doublings else []
    for value in ticks(axes.y_low, axes.y_high, 5):
        y = axes.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.6g}</text>')
    for value in _few(xs, 8) if axes.doublings else ticks(axes.x_low, axes.x_high, 6):
        parts.append(f'<text x="{axes.x(value):.1f}" y="{bottom + 20}" text-anchor="middle">{value:,.0f}</text>')
    return "\n".join([*parts, ""])


def _few(values: Sequence[float], most: int) -> Sequence[float]:
    return values[:: math.ceil(len(values) / most)]


def _line(axes: _Axes, points: Sequence[Point], style: str) -> str:
    """Return a line through the points, broken where a value is not finite."""
    path, pen_up = [], True
    for x, value in _thinned(points):
        if not math.isfinite(value):
            pen_up = True
            continue
        path.append(f"{'M' if pen_up else 'L'}{axes.x(x):.1f} {axes.y(value):.1f}")
        pen_up = False
    return f'<path class="{style}" d="{"".join(path)}"/>\n'


def _dots(axes: _Axes, points: Sequence[Point], along: str, name: str) -> str:
    return "".join(
        f'<circle class="dot second" cx="{axes.x(x):.1f}" cy="{axes.y(value):.1f}" r="4">'
        f"<title>{along} {x}: {name} {value:.6g}</title></circle>\n"
        for x, value in _thinned(points)
    )


def _hits(axes: _Axes, points: Sequence[Point], along: str) -> str:
    """Return narrow invisible columns that tell the value under the pointer, in place of a script."""
    shown = _thinned(points)
    width = max(2.0, (_WIDTH - _LEFT - _RIGHT) / max(1, len(shown)))
    return "".join(
        f'<rect class="hit" x="{axes.x(x) - width / 2:.1f}" y="{_TOP}" width="{width:.1f}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}"><title>{along} {x}: {value:.6g}</title></rect>\n'
        for x, value in shown
    )


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most `_MOST_POINTS`: of each group of neighbours its lowest and highest, so that no spike is lost."""
    if len(points) <= _MOST_POINTS:
        return points
    group = math.ceil(2 * len(points) / _MOST_POINTS)
    kept: list[Point] = []
    for start in range(0, len(points), group):
        inside = points[start : start + group]
        good = finite(inside)
        ends = {min(good, key=lambda point: point[1]), max(good, key=lambda point: point[1])} if good else inside[:1]
        kept += sorted(ends)
    return kept
