"""Draws charts as SVG, and the HTML page that they stand on.

A page needs nothing else, neither scripts nor a network, and follows the reader's light or dark setting.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_ext.errors import ConfigurationError
from megatron_ext.parts.experts.load_colour import load_colour
from megatron_ext.plugins.pages.markup import Content, Markup, document, element, joined, svg_file

Point = tuple[float, float]
"""Place on the horizontal axis, such as an iteration, and value."""

# The drawing of one chart, in SVG units.
_WIDTH, _HEIGHT = 560, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 28, 12, 30
_MOST_POINTS = 600
_MOST_VALUE = 1e300  # the difference of two such is finite

# Told apart in light and dark, and by readers who do not see red and green as different (Okabe and Ito 2008).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")

STYLE = """
:root { color-scheme: light dark; --page: #fbfbfa; --ink: #1d1f23; --quiet: #63666d; --grid: #e2e3e5;
        --first: #1f66b5; --second: #bd4f0a; --third: #00795a; --fourth: #cc79a7; --fifth: #e69f00 }
@media (prefers-color-scheme: dark) {
  :root { --page: #16181c; --ink: #e8e9eb; --quiet: #9a9da4; --grid: #30333a;
          --first: #70aef5; --second: #f79a56; --third: #2fc79b } }
body { margin: 2rem auto; max-width: 1180px; padding: 0 1rem; background: var(--page); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 1.35rem; margin: 0 0 .5rem; overflow-wrap: anywhere }
h2 { font-size: 1rem; margin: 0 0 .25rem }
h2 span, summary, .prompt { font-weight: normal; color: var(--quiet) }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 1.5rem }
h1+pre span { display: inline-block; padding-left: 2ch; text-indent: -2ch }
@media (max-width: 600px) { h1+pre { white-space: pre-line } }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr)); gap: 2rem }
.wide { max-width: 1180px; margin: 2rem 0; overflow-x: auto }
section svg { width: 100%; height: auto; display: block }
text { fill: var(--quiet); font: 12px system-ui, sans-serif; font-variant-numeric: tabular-nums }
.grid { stroke: var(--grid) }
.line { fill: none; stroke: var(--first); stroke-width: 1.6; stroke-linejoin: round }
.second { stroke: var(--second) }
.faint { opacity: .35; stroke-width: 1 }
.change { stroke: var(--quiet); stroke-width: 1.4; stroke-dasharray: 2 3 }
.dot { fill: var(--first) } .dot.second { fill: var(--second); stroke: var(--page) }
.paper { fill: var(--page) } .legend { fill: currentColor }
.title { fill: var(--ink); font-size: 14px; font-weight: 600 }
details { margin: 0 0 2rem } summary { cursor: pointer } a { color: var(--first); overflow-wrap: anywhere }
.key { color: var(--first) } .key.second { color: var(--second) }
.third { stroke: var(--third); color: var(--third) }
.fourth { stroke: var(--fourth); color: var(--fourth) }
.fifth { stroke: var(--fifth); color: var(--fifth) }
.hits rect { fill: transparent } .hits rect:hover { fill: var(--quiet); fill-opacity: .25 }
"""

TABLE_STYLE = """
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { padding: .15rem 1.25rem .15rem 0; text-align: left; vertical-align: top; font-weight: normal; }
td { overflow-wrap: anywhere; } th { color: var(--quiet); } tr + tr > * { border-top: 1px solid var(--grid); }
"""

BARS_STYLE = """
.limit { stroke: var(--ink); stroke-dasharray: 4 3; }
.bars text { paint-order: stroke; stroke: var(--page); stroke-width: 3px; }
""" + "".join(f".part{n} {{ color: {colour}; fill: {colour}; }}\n" for n, colour in enumerate(COLOURS))


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
    ratios: bool = False
    """Whether equal distances along y are equal ratios; all y are above 0 then."""

    @classmethod
    def around(cls, points: Sequence[Point], *, doublings: bool, ratios: bool = False) -> "_Axes":
        xs, ys = [float(x) for x, _ in points], [y for _, y in points]
        low, high = min(ys), max(ys)
        room = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
        bottom = low / (1 + 0.05 * (high / low - 1)) if ratios else low - room
        return cls(min(xs), max(max(xs), min(xs) + 1), bottom, high + room, doublings, ratios)

    def x(self, value: float) -> float:
        low, high = self.x_low, self.x_high
        if self.doublings:
            value, low, high = math.log2(value), math.log2(low), math.log2(high)
        return _LEFT + (value - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_low, self.y_high
        if self.ratios:
            value, low, high = math.log2(value), math.log2(low), math.log2(high)
        return _HEIGHT - _BOTTOM - (value - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)


def page(title: str, lines: Iterable[str], body: Content, *, style: str = "") -> Markup:
    """Return a page.

    Args:
        title: its heading.
        lines: what stands under it.
        body: the rest.
        style: further rules of style.
    """
    # Each line wraps by itself, with an arrow that does not break in two.
    shown = [["\n" * bool(number), element("span", line.replace("->", "\u2192"))] for number, line in enumerate(lines)]
    head = [element("h1", title), "\n", element("pre", shown), "\n"]
    return document(title, STYLE + style, head, body)


def section(heading: Content, *body: Content, **attributes: object) -> Markup:
    """Return a part of a page; each of `body` begins on a line of its own."""
    lines = [[each, "\n"] for each in (element("h2", heading), *body)]
    return joined(element("section", "\n", lines, **attributes), "\n")


def wide(heading: Content, *body: Content) -> Markup:
    """Return a part of a page that is as wide as the page."""
    return section(heading, *body, class_="wide")


def table(heading: Content, head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> Markup:
    """Return a table as a part of a page that is as wide as the page, and has TABLE_STYLE.

    Args:
        heading: what stands above it.
        head: names of the columns, without the first.
        rows: name and cells of each.
    """
    lines = [element("tr", element("th", ""), *(element("th", each) for each in head))]
    lines += [element("tr", element("th", name), *(element("td", cell) for cell in cells)) for name, cells in rows]
    return wide(heading, element("table", "\n", [[line, "\n"] for line in lines]))


def main(charts: Iterable[Markup]) -> Markup:
    """Return the charts next to each other."""
    return joined(element("main", "\n", charts), "\n")


def svg(width: float, height: float, label: str, *drawing: Content, natural: bool = False) -> Markup:
    """Return a drawing, which readers who do not see it know by its label; as wide as the page, or of natural size."""
    size = {"style": f"width:{width:.0f}px;min-width:0"} if natural else {}
    return element("svg", "\n", drawing, viewBox=f"0 0 {width} {height:.0f}", role="img", aria_label=label, **size)


def picture(
    width: float, height: float, title: str, *drawing: Content, key: Sequence[tuple[str, str]], style: str = ""
) -> Markup:
    """Return a drawing as an SVG file of its own, with a title and a key above it, for light and dark pages.

    Args:
        width: the drawing's width; its height is the next.
        title: what the picture shows; it is also what readers hear who do not see it.
        drawing: as of `svg`.
        key: text and class of each entry.
        style: further rules of style.
    """
    entries: list[Content] = [element("text", title, x=12, y=22, class_="title")]
    x = 12.0
    for text, kind in key:
        entries.append(element("text", text, x=f"{x:.0f}", y=42, class_=f"{kind} legend"))
        x += 7.2 * len(text) + 16
    paper = element("rect", class_="paper", width="100%", height="100%")
    inside = element("g", "\n", drawing, transform="translate(0 52)")
    return svg_file(title, STYLE + style, width, height + 52, [[each, "\n"] for each in (paper, *entries, inside)])


def line_picture(name: str, unit: str, series: Sequence[Series], *, along: str, style: str = "") -> Markup:
    """Return one chart as an SVG file, without the values under the pointer.

    Raises:
        ConfigurationError: no value is finite.
    """
    shown = finite(point for each in series for point in each.points)
    if not shown:
        raise ConfigurationError(f"{name}: there is no finite value to draw")
    axes = _Axes.around(shown, doublings=False)
    marks = [*_grid(axes, along, _ticks(axes)), *(_line(axes, each.points, _classes("line", each)) for each in series)]
    key = [(f"\u2500 {each.name}", _classes("key", each)) for each in series if each.name]
    drawing = [[mark, "\n"] for mark in marks]
    return picture(_WIDTH, _HEIGHT, f"{name}, {unit}", drawing, key=key, style=style)


def label(x: float | str, y: float, text: str, anchor: str) -> Markup:
    """Return a text of a drawing, which ends at x, is centred on x or begins at x (anchor `end`, `middle`, `start`)."""
    return element("text", text, x=x, y=f"{y:.1f}", text_anchor=anchor)


@dataclass(frozen=True)
class Extras:
    """Parts that the charts of a run have in common beyond their lines."""

    second: Callable[[float], str] | None = None
    """Text under a tick of the horizontal axis, such as the tokens that were read until then."""
    second_name: str = ""
    marks: Sequence[tuple[int, str]] = ()
    """(position on the horizontal axis, what changed) of each mark."""


def chart(
    name: str,
    unit: str,
    series: Sequence[Series],
    *,
    along: str,
    doublings: bool = False,
    logarithmic: bool = False,
    extras: Extras | None = None,
) -> Markup:
    """Return one chart: a line for each series, with a key where there are several.

    Args:
        along: unit that the horizontal axis counts, in the singular.
        doublings: whether it counts in doublings, from 1 upwards, with a tick at each x that the data has.
        logarithmic: whether both axes are; points that are not above 0 are left out.
        extras: marks and a second labelling of the axis.
    """
    extras = extras or Extras()
    heading: list[Content] = [name, " ", element("span", f"{unit}{f' by {along}' if doublings else ''}")]
    if len(series) > 1:
        for each in series:
            if each.name:
                mark = "\u25cf" if each.dotted else "\u2500"
                heading += [" ", element("span", f"{mark}\u00a0{each.name}", class_=_classes("key", each))]
    if logarithmic:
        series = [replace(each, points=[at for at in each.points if min(at) > 0]) for each in series]
    shown = finite(point for each in series for point in each.points)
    if not shown:
        return section(heading, element("p", "Nothing to show."))
    axes = _Axes.around(shown, doublings=doublings or logarithmic, ratios=logarithmic)
    along_ticks = _few(sorted({x for x, _ in shown}), 8) if doublings else _ticks(axes)
    marks = [*_grid(axes, along, along_ticks), *_changes(axes, extras.marks)]
    height = _HEIGHT
    if extras.second is not None:
        height += 16
        marks.append(label(_LEFT - 8, _HEIGHT + 6, extras.second_name, "end"))
        marks += [label(f"{axes.x(x):.1f}", _HEIGHT + 6, extras.second(x), "middle") for x in along_ticks]
    marks += [_line(axes, each.points, _classes("line", each)) for each in series]
    for each in series:
        shown = finite(each.points)
        if each.dotted:
            marks += _dots(axes, shown, along, each.name)
        elif not each.style.startswith("smooth"):
            marks.append(element("g", *_hits(axes, shown, along), class_="hits"))
    return section(heading, svg(_WIDTH, height, f"{name} by {along}", [[mark, "\n"] for mark in marks]))


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Return the means of the values around each point, weighted by exp(-distance / window) to both sides."""
    shown, keep = finite(points), math.exp(-1 / window)

    def means(values: Iterable[float]) -> list[float]:
        found, mean, weight = [], 0.0, 0.0
        for value in values:
            mean, weight = keep * mean + value, keep * weight + 1
            found.append(mean / weight)
        return found

    values = [value for _, value in shown]
    both = zip(means(values), reversed(means(reversed(values))), strict=True)
    return [(x, (before + after) / 2) for (x, _), (before, after) in zip(shown, both, strict=True)]


def _changes(axes: _Axes, marks: Sequence[tuple[int, str]]) -> Iterator[Markup]:
    """Yield a line with its text under the pointer for each change that the axis has."""
    for at, text in marks:
        if axes.x_low <= at <= axes.x_high:
            line = f"M{axes.x(at):.1f} {_TOP}V{_HEIGHT - _BOTTOM}"
            yield element("path", element("title", f"iteration {at}: {text}"), class_="change", d=line)


def _ticks(axes: _Axes) -> Sequence[float]:
    """Return where the horizontal axis has its numbers: not where its name stands."""
    if not axes.doublings:
        whole = (x for x in ticks(axes.x_low, axes.x_high, 6) if x == round(x))
        return [x for x in whole if axes.x(x) >= _LEFT + 14]
    powers = range(math.floor(math.log10(axes.x_low)), math.ceil(math.log10(axes.x_high)) + 1)
    round_numbers = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return _few([x for x in round_numbers if axes.x_low <= x <= axes.x_high and axes.x(x) >= _LEFT + 14], 8)


Bars = Mapping[str, Mapping[str, float]]
"""The parts of each row of a drawing of bars, by name: no more of them than there are colours."""


def bars_picture(title: str, unit: str, rows: Bars, limit: float) -> Markup:
    """Return an SVG file with a bar for each row, made of its parts.

    Args:
        title: what the picture shows.
        unit: of the values.
        rows: the bars.
        limit: value that a line marks as the room available.
    """
    names, height, drawing = _bars(unit, rows, limit, left=170, width=760)
    key = [(f"\u25a0 {name}", f"part{n}") for n, name in enumerate(names)]
    return picture(760, height, title, drawing, key=key, style=BARS_STYLE)


def bars_chart(title: str, unit: str, rows: Bars, limit: float | None = None) -> Markup:
    """Return the bars as a part of a page, which has BARS_STYLE; the arguments are as in `bars_picture`."""
    names, height, drawing = _bars(unit, rows, limit, left=28, width=_WIDTH)
    key = [[" ", element("span", f"\u25a0\u00a0{name}", class_=f"key part{n}")] for n, name in enumerate(names)]
    heading = [title, " ", element("span", unit), key if len(names) > 1 else ""]
    return section(heading, svg(_WIDTH, height, f"{title}, {unit}", drawing))


def _bars(unit: str, rows: Bars, limit: float | None, *, left: float, width: float) -> tuple[list[str], float, Content]:
    """Return the names of the parts, the height of the drawing, and the drawing."""
    height = 26
    longest = max(limit or 0.0, *(sum(parts.values()) for parts in rows.values()))
    scale = (width - left - 60) / longest
    names = list(dict.fromkeys(name for parts in rows.values() for name, value in parts.items() if value))
    bottom = height * len(rows)
    marks, values = list[Content](), list[Content]()
    for number, (row, parts) in enumerate(rows.items()):
        y, x = number * height, float(left)
        marks.append(label(left - 8, y + 17, row, "end"))
        for name in names:
            value = parts.get(name, 0.0)
            hover = element("title", f"{row}: {name} {value:.3g} {unit}")
            place = {"x": f"{x:.1f}", "y": y + 3, "width": f"{value * scale:.1f}", "height": height - 6}
            marks.append(element("rect", hover, class_=f"part{names.index(name)}", **place))
            x += value * scale
        values.append(label(f"{x + 6:.1f}", y + 17, f"{_amount(sum(parts.values()))} {unit}", "start"))
    if limit is not None:
        border = left + limit * scale
        marks.append(element("path", class_="limit", d=f"M{border:.1f} 0V{bottom}"))
        side = "end" if border > width / 2 else "start"
        values.append(label(f"{border:.1f}", bottom + 16, f"{_amount(limit)} {unit} may be filled", side))
        bottom += 24
    return names, bottom, element("g", "\n", [[mark, "\n"] for mark in (*marks, *values)], class_="bars")


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _classes(kind: str, series: Series) -> str:
    return " ".join(filter(None, (kind, "second" if series.dotted else "", series.style)))


def finite(points: Iterable[Point]) -> list[Point]:
    """Return the points whose value is finite, and not so large that a range of such is not."""
    return [(x, value) for x, value in points if abs(value) <= _MOST_VALUE]


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) between low and high."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    # From a multiple, not by adding up, so that 0.3 is not 0.30000000000000004.
    return [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _grid(axes: _Axes, along: str, xs: Sequence[float]) -> Iterator[Markup]:
    bottom = _HEIGHT - _BOTTOM
    if not axes.doublings or axes.ratios:
        yield label(_LEFT - 8, bottom + 20, along, "end")
    for value in ticks(axes.y_low, axes.y_high, 5):
        y = axes.y(value)
        yield element("path", class_="grid", d=f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}")
        yield label(_LEFT - 8, y + 4, f"{value:,.6g}", "end")
    for value in xs:
        yield label(f"{axes.x(value):.1f}", bottom + 20, f"{value:,.0f}", "middle")


def _few(values: Sequence[float], most: int) -> Sequence[float]:
    return values[:: math.ceil(len(values) / most)]


def _line(axes: _Axes, points: Sequence[Point], style: str) -> Markup:
    """Return a line through the points, broken where a value is not finite."""
    path, pen_up = [], True
    for x, value in _thinned(points):
        if not finite([(x, value)]):
            pen_up = True
            continue
        path.append(f"{'M' if pen_up else 'L'}{axes.x(x):.1f} {axes.y(value):.1f}")
        pen_up = False
    return element("path", class_=style, d="".join(path))


def _dots(axes: _Axes, points: Sequence[Point], along: str, name: str) -> Iterator[Markup]:
    for x, value in _thinned(points):
        title = element("title", f"{along} {x}: {name} {value:.6g}")
        yield element("circle", title, class_="dot second", cx=f"{axes.x(x):.1f}", cy=f"{axes.y(value):.1f}", r=4)


def _hits(axes: _Axes, points: Sequence[Point], along: str) -> Iterator[Markup]:
    """Yield narrow invisible columns that tell the value under the pointer, in place of a script."""
    shown = _thinned(points)
    width = max(2.0, (_WIDTH - _LEFT - _RIGHT) / max(1, len(shown)))
    for x, value in shown:
        size = {"width": f"{width:.1f}", "height": _HEIGHT - _TOP - _BOTTOM}
        title = element("title", f"{along} {x}: {value:.6g}")
        yield joined(element("rect", title, x=f"{axes.x(x) - width / 2:.1f}", y=_TOP, **size), "\n")


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


def load_picture(name: str, rows: Sequence[tuple[str, Sequence[int]]], along: str) -> Markup:
    """Return a picture with a line of cells for each row, coloured by the cell's count divided by the row's mean.

    Args:
        rows: name and counts of each.
        along: name of a cell, in the singular.
    """
    height, most = 14.0, max(len(counts) for _, counts in rows)
    marks: list[Content] = []
    for number, (row, counts) in enumerate(rows):
        marks.append(label(_LEFT - 8, (number + 1) * height - 3, row, "end"))
        width, mean = (_WIDTH - _LEFT - _RIGHT) / max(most, 1), sum(counts) / max(len(counts), 1) or 1.0
        for index, count in enumerate(counts):
            title = element("title", f"{row}, {along} {index}: {count:,}, {count / mean:.2f} of an even load")
            place = {"x": f"{_LEFT + index * width:.1f}", "y": f"{number * height:.0f}", "width": f"{width:.2f}"}
            fill = "#{:02x}{:02x}{:02x}".format(*load_colour(count / mean))
            marks += [element("rect", title, **place, height=height - 1, fill=fill), "\n"]
    return svg(_WIDTH, height * len(rows) + 1, name, *marks)
