"""Shows a run as one HTML page: loss, learning rate, gradient norm and speed over the iterations, and with
--log-straggler the slowest rank.

The page needs nothing else, neither scripts nor a network, and follows the reader's light or dark setting.
"""

import html
import math
from dataclasses import dataclass

from megatron_ext.telemetry.curve import Point, RunHistory, finite, summary

# The drawing of one chart, in SVG units.
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 12, 30
_MOST_POINTS = 600

_STYLE = """
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
class _Axes:
    """Maps data to the drawing; the ranges are never empty."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float

    @classmethod
    def around(cls, points: list[Point]) -> "_Axes":
        xs, ys = [float(x) for x, _ in points], [y for _, y in points]
        low, high = min(ys), max(ys)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        return cls(min(xs), max(max(xs), min(xs) + 1), low - room, high + room)

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)


def run_page(history: RunHistory, title: str) -> str:
    """Return the page as text.

    Args:
        history: the run.
        title: its heading.
    """
    charts = [
        _chart("Loss", "nats per token", history.points("lm_loss"), history.validation_points),
        _chart("Learning rate", "", history.points("learning_rate")),
        _chart("Gradient norm", "before clipping", history.points("grad_norm")),
        _chart("Speed", "tokens per second, whole job", history.points("tokens_per_second")),
    ]
    if history.slowness_points:
        unit = "compute time over its peers'"
        charts.append(_chart("Slowest rank", unit, history.slowness_points))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n<pre>{html.escape(chr(10).join(summary(history)))}</pre>\n"
        f"<main>\n{''.join(charts)}</main>\n</body>\n</html>\n"
    )


def _chart(name: str, unit: str, first: list[Point], second: list[Point] | None = None) -> str:
    """Return one chart; a second series (validation) is drawn with its points and adds a key to the heading."""
    heading = f"{name} <span>{unit}</span>"
    if second:
        heading += ' <span class="key">&#9472; training</span> <span class="key second">&#9679; validation</span>'
    shown = finite(first + (second or []))
    body = "<p>Nothing to show.</p>"
    if shown:
        axes = _Axes.around(shown)
        marks = _grid(axes) + _line(axes, first, "line")
        if second:
            marks += _line(axes, second, "line second")
        marks += _hits(axes, finite(first))
        if second:
            marks += _dots(axes, finite(second))
        body = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{name} by iteration">\n{marks}</svg>'
    return f"<section>\n<h2>{heading}</h2>\n{body}\n</section>\n"


def _grid(axes: _Axes) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [f'<text x="{_LEFT - 8}" y="{bottom + 20}" text-anchor="end">iteration</text>']
    for value in _ticks(axes.y_low, axes.y_high, 5):
        y = axes.y(value)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:,.6g}</text>')
    for value in _ticks(axes.x_low, axes.x_high, 6):
        parts.append(f'<text x="{axes.x(value):.1f}" y="{bottom + 20}" text-anchor="middle">{value:,.0f}</text>')
    return "\n".join([*parts, ""])


def _ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) between low and high."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    # From a multiple, not by adding up, so that 0.3 is not 0.30000000000000004.
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _line(axes: _Axes, points: list[Point], style: str) -> str:
    """Return a line through the points, broken where a value is not finite."""
    path, pen_up = [], True
    for iteration, value in _thinned(points):
        if not math.isfinite(value):
            pen_up = True
            continue
        path.append(f"{'M' if pen_up else 'L'}{axes.x(iteration):.1f} {axes.y(value):.1f}")
        pen_up = False
    return f'<path class="{style}" d="{"".join(path)}"/>\n'


def _dots(axes: _Axes, points: list[Point]) -> str:
    return "".join(
        f'<circle class="dot second" cx="{axes.x(iteration):.1f}" cy="{axes.y(value):.1f}" r="4">'
        f"<title>iteration {iteration}: validation {value:.6g}</title></circle>\n"
        for iteration, value in _thinned(points)
    )


def _hits(axes: _Axes, points: list[Point]) -> str:
    """Return narrow invisible columns that tell the value under the pointer, in place of a script."""
    shown = _thinned(points)
    width = max(2.0, (_WIDTH - _LEFT - _RIGHT) / max(1, len(shown)))
    return "".join(
        f'<rect class="hit" x="{axes.x(iteration) - width / 2:.1f}" y="{_TOP}" width="{width:.1f}" '
        f'height="{_HEIGHT - _TOP - _BOTTOM}"><title>iteration {iteration}: {value:.6g}</title></rect>\n'
        for iteration, value in shown
    )


def _thinned(points: list[Point]) -> list[Point]:
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
