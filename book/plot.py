"""L3: matplotlib figures of measurements and traces.

Figures are transparent, with ink that reads on white and on black, because the website has a light and a dark theme.
They are narrow: a phone shrinks a figure to its width, and text of 10 points has 12 of its pixels then.
"""
from __future__ import annotations

import io
import math
import re
import textwrap
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence

from book.extras import needed_by
from book.trace import Trace, TraceError

with needed_by("book.plot", "matplotlib"):
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

INK = "#707a89"
WIDTH = 4.0  # inches
DPI = 120
TEXT = 10  # points
ROW = 0.2  # inches from one line of this text to the next
LINE, TITLE_LINE = 44, 47  # characters of this text, and of a title, that fit across a figure
SERIES = ("#3a86c8", "#c8612e", "#3d9a6d", "#9a6fc4", "#a08526", "#c2528b")
MARKERS = ("o", "s", "^", "D", "v", "P")
CLOUD = 50  # from so many points on they are small, and drawn as pixels
SVG = "http://www.w3.org/2000/svg"
GROUP = f"{{{SVG}}}g"
UNSEEN = "fill: none; opacity: 0"  # of the paper, and of the axes' background
FAMILY = re.compile(r"font-family: [^;]*;")  # of each label; the whole picture has one
LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
NUMBERS_OF = ("d", "x", "y", "width", "height", "viewBox", "transform")  # attributes of an SVG's elements
Curve = tuple[Sequence[float], Sequence[float]]
SHADES = LinearSegmentedColormap.from_list("shades", ("#d8e7f6", "#17406b"))  # of the smallest number, the largest
DARK = 0.18  # as bright as this, a colour leaves black and white letters equally readable
FILLS = {"send": SERIES[0], "recv": SERIES[2], "collective": SERIES[3], "compute": SERIES[1]}
KINDS = {"send": "send", "recv": "receive", "collective": "collective", "compute": "compute"}  # in a legend


class Chart(Figure):
    """A figure that a notebook keeps as SVG as well, which is sharp at any size.

    The PNG beside it is for viewers that show an untrusted notebook, such as JupyterLab: they refuse an SVG, which can
    hold a program.
    """

    def _repr_svg_(self) -> str:
        return svg(self)


def blank(height: float, title: str = "", xlabel: str = "", ylabel: str = "") -> tuple[Figure, Axes]:
    """A figure of this height in inches, and its axes, in the book's colours and with nothing drawn yet.

    It is higher by what a title takes beyond one line.
    """
    title = textwrap.fill(title, TITLE_LINE)
    height += ROW * title.count("\n")
    figure, axes = plt.subplots(figsize=(WIDTH, height), dpi=DPI, layout="constrained", FigureClass=Chart)
    figure.patch.set_alpha(0)
    axes.patch.set_alpha(0)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=TEXT + 1)
    axes.tick_params(colors=INK, which="both", labelsize=TEXT)
    axes.set_xlabel(xlabel, color=INK, fontsize=TEXT)
    axes.set_ylabel(ylabel, color=INK, fontsize=TEXT)
    for side, spine in axes.spines.items():
        spine.set_color(INK)
        spine.set_visible(side in ("left", "bottom"))
    return figure, axes


def legend(figure: Figure) -> None:
    """Name below the axes what is drawn so far, in as many columns as fit. The figure grows by the rows' height."""
    named = list(zip(*figure.axes[0].get_legend_handles_labels()))
    columns = max(1, LINE // (max(len(label) for _, label in named) + 8))
    rows = math.ceil(len(named) / columns)
    figure.set_figheight(figure.get_figheight() + ROW * rows)
    # matplotlib fills columns, one entry longer as long as there are entries left over; we read rows.
    by_column = [entry for column in range(columns) for entry in named[column::columns]]
    figure.legend(*zip(*by_column), frameon=False, labelcolor=INK, fontsize=TEXT, loc="outside lower left",
                  ncols=columns)


def time_against_size(sizes: Sequence[float], measured: Mapping[str, Sequence[float]],
                      modelled: Mapping[str, Sequence[float]] = {}, title: str = "") -> Figure:
    """Seconds against buffer size in bytes, both logarithmic: points for measured series, lines for modelled ones.

    Each series has one time in seconds per size; series of the same name share a colour.
    """
    figure, axes = blank(3.3, title, "buffer", "time")
    for place, name in enumerate(dict.fromkeys([*measured, *modelled])):
        color, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
        if name in modelled:
            axes.plot(sizes, modelled[name], color=color, linewidth=1.5, label=f"{name}, model")
        if name in measured:
            axes.plot(sizes, measured[name], color=color, linestyle="none", marker=marker, markersize=6, label=name)
    axes.set(xscale="log", yscale="log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _bytes(x)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda x, _: _seconds(x)))
    legend(figure)
    return _closed(figure)


def bars(rows: Mapping[str, Mapping[str, float]], *, unit: str = "", stacked: bool = True, digits: int = 1,
         title: str = "") -> Figure:
    """A row for each name, with the values of its parts as bars, one after the other or one below the other.

    Each bar has its number, or the sum where they are stacked; `digits` is how many decimals it has, `unit` follows it.
    """
    parts = list(dict.fromkeys(part for row in rows.values() for part in row))
    lanes = 1 if stacked else len(parts)
    figure, axes = blank(0.55 + len(rows) * (0.14 + 0.2 * lanes), title)
    for place, part in enumerate(parts):
        at = [number + (0 if stacked else 0.8 * ((place + 0.5) / lanes - 0.5)) for number in range(len(rows))]
        values = [row.get(part, 0.0) for row in rows.values()]
        before = [sum(row.get(other, 0.0) for other in parts[:place]) if stacked else 0.0 for row in rows.values()]
        axes.barh(at, values, 0.72 / lanes, left=before, color=SERIES[place % len(SERIES)], label=part)
        if not stacked or part == parts[-1]:
            for y, value, left in zip(at, values, before):
                axes.annotate(f"{value + left:,.{digits}f}{unit}", (value + left, y), xytext=(4, 0), va="center",
                              textcoords="offset points", color=INK, fontsize=TEXT)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    if len(parts) > 1:
        legend(figure)
    return _closed(figure)


def lines(series: Mapping[str, Sequence[float]], xlabel: str, ylabel: str, title: str = "") -> Figure:
    """A line for each series against its position 0, 1, 2, ...; earlier ones are wider, so that equal ones all show."""
    figure, axes = blank(3.0, title, xlabel, ylabel)
    for place, (name, values) in enumerate(series.items()):
        width = 1.5 + 3.0 * (len(series) - 1 - place)
        axes.plot(values, color=SERIES[place % len(SERIES)], linewidth=width, label=name)
    legend(figure)
    return _closed(figure)


def graph(lines: Mapping[str, Curve], points: Mapping[str, Curve] = {}, *, xlabel: str, ylabel: str, title: str = "",
          units: tuple[str, str] = ("", ""), log: str = "", marks: Mapping[str, float] = {}) -> Figure:
    """Lines and points, each a pair of x and y values; a line and points of the same name share a colour.

    `units` of x and y are "", "%" (of shares), "B" or "s"; the axes that `log` names ("x", "y" or "xy") are
    logarithmic, x with ticks at the values of the lines, or at every second one if there are more than seven.
    Each of `marks` is a dotted line across x with its name, such as where two lines cross. Lines lie over points, and
    a few points over many.
    """
    figure, axes = blank(3.0, title, xlabel, ylabel)
    for place, name in enumerate(dict.fromkeys([*lines, *points])):
        color, marker = SERIES[place % len(SERIES)], MARKERS[place % len(MARKERS)]
        if name in lines:
            axes.plot(*lines[name], color=color, linewidth=2, label=name, zorder=3)  # points do not hide it
        if name in points:
            label, num_points = None if name in lines else name, len(points[name][0])
            is_cloud = num_points >= CLOUD
            axes.plot(*points[name], color=color, linestyle="none", marker=marker, markersize=3 if is_cloud else 6,
                      label=label, rasterized=is_cloud, zorder=2 + 1 / (1 + num_points))
    for axis, side, unit in (("x", axes.xaxis, units[0]), ("y", axes.yaxis, units[1])):
        if axis in log:
            axes.set(**{f"{axis}scale": "log"})
            side.set_minor_formatter(NullFormatter())
            low, high = side.get_view_interval()
            if high < 30 * low or math.floor(math.log10(high)) <= math.ceil(math.log10(low)):  # one power of ten
                side.set_major_locator(LogLocator(subs=(1, 2, 5)))
        side.set_major_formatter(FuncFormatter(lambda value, _, write=UNITS[unit]: write(value)))
    if "x" in log:
        values = sorted({value for line in lines.values() for value in line[0]})
        axes.set_xticks(values[::1 + len(values) // 8])
    _mark(axes, marks)
    legend(figure)
    return _closed(figure)


def _mark(axes: Axes, marks: Mapping[str, float]) -> None:
    for name, x in marks.items():
        axes.axvline(x, color=INK, linewidth=1, linestyle=":")
        axes.annotate(name, (x, 0.02), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
                      color=INK, fontsize=TEXT)


def groups(rows: Mapping[str, Sequence[Sequence[int]]], title: str = "") -> Figure:
    """A row of ranks for each name, where the ranks of one group have one colour and one letter."""
    figure, axes = blank(0.45 + 0.36 * (len(rows) + 1), title)
    for y, parts in enumerate(rows.values()):
        for number, ranks in enumerate(parts):
            axes.barh([y] * len(ranks), 0.9, 0.8, [rank - 0.45 for rank in ranks], color=SERIES[number % len(SERIES)])
            for rank in ranks:
                axes.annotate(chr(ord("a") + number), (rank, y), ha="center", va="center", color="white", fontsize=TEXT)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set_xticks(range(sum(map(len, next(iter(rows.values()))))))
    axes.xaxis.tick_top()
    axes.invert_yaxis()
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    return _closed(figure)


def heat_map(rows: Mapping[str, Mapping[str, float | None]], *, xlabel: str = "", ylabel: str = "", title: str = "",
             without: str = "none") -> Figure:
    """A cell with its number, rounded to an integer, for each entry of each row; the larger, the darker.

    What a row lacks has no cell; the first row's columns come first. Where the number is None, the cell is open and
    says what `without` says. Raises ValueError where no cell has a number.
    """
    numbers = [number for row in rows.values() for number in row.values() if number is not None]
    if not numbers:
        raise ValueError("a heat map needs a number in one cell at least")
    low, spread = min(numbers), max(numbers) - min(numbers) or 1.0
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    figure, axes = blank(0.85 + 0.42 * len(rows), title, xlabel, ylabel)
    for y, row in enumerate(rows.values()):
        for name, number in row.items():
            x, text, color, ink = columns.index(name), without, INK, INK
            if number is not None:
                text, color = f"{number:,.0f}", SHADES((number - low) / spread)
                bright = sum(part * channel**2.2 for part, channel in zip((0.2126, 0.7152, 0.0722), color))
                ink = "black" if bright > DARK else "white"
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=color, fill=number is not None))
            axes.annotate(text, (x, y), ha="center", va="center", color=ink, fontsize=TEXT)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), list(rows))
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return _closed(figure)


def matrices(parts: Mapping[str, Sequence[tuple[str, int, int, int, int]]], title: str = "") -> Figure:
    """Matrices side by side and to scale, each from its parts: (whose, first row, first column, rows, columns).

    What belongs to the same one has the same colour, in all matrices; a matrix has its name below it.
    """
    right = [max(left + width for _, _, left, _, width in own) for own in parts.values()]
    depth = max(top + height for own in parts.values() for _, top, _, height, _ in own)
    gap = 0.04 * sum(right)
    across = sum(right) + gap * (len(right) - 1)
    figure, axes = blank(0.8 + 0.94 * WIDTH * depth / across, title)
    owners = sorted({whose for own in parts.values() for whose, *_ in own})
    start, named = 0.0, set()
    for (name, own), width in zip(parts.items(), right):
        for whose, top, left, rows, columns in own:
            axes.add_patch(Rectangle((start + left, top), columns, rows, label=None if whose in named else whose,
                                     facecolor=SERIES[owners.index(whose) % len(SERIES)]))
            named.add(whose)
        bottom = max(top + rows for _, top, _, rows, _ in own)
        axes.annotate(name, (start + width / 2, bottom), xytext=(0, -3), textcoords="offset points", ha="center",
                      va="top", color=INK, fontsize=TEXT)
        start += width + gap
    axes.set(xlim=(0, across), ylim=(depth + 0.3 * gap + across * ROW / WIDTH, 0), aspect="equal")
    axes.axis("off")
    legend(figure)
    return _closed(figure)


def spans(lanes: Mapping[str, Sequence[tuple[float, float]]], title: str = "") -> Figure:
    """A lane for each name with a bar for each (start, end), in seconds, two colours in turn; the axis has milliseconds
    and begins at 0."""
    figure, axes = blank(0.6 + 0.3 * len(lanes), title, "ms")
    for place, bars in enumerate(lanes.values()):
        axes.broken_barh([(1000 * start_s, 1000 * (end_s - start_s)) for start_s, end_s in bars], (place - 0.4, 0.8),
                         color=SERIES[place % 2])
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    return _closed(figure)


def strokes(lanes: Mapping[str, Mapping[str, Sequence[float]]], *, bars: Mapping[str, tuple[float, float]] = {},
            above: Mapping[str, float] = {}, marks: Mapping[str, float] = {}, labels: tuple[str, str] = ("", ""),
            title: str = "") -> Figure:
    """A lane for each name, with a stroke at each x of each kind, a colour for a kind, and one open bar from x to x.

    `above` are ticks over the lanes, by name; `labels` are those of both axes, below and above. Each of `marks` is a
    dotted line with its name.
    """
    figure, axes = blank(1.3 + 0.4 * len(lanes), title, labels[0])
    kinds = list(dict.fromkeys(kind for lane in lanes.values() for kind in lane))
    for place, kind in enumerate(kinds):
        half = 0.15 if place else 0.35
        # One broken line takes a tenth of the room of a line for each stroke.
        points = [point for y, lane in enumerate(lanes.values()) for x in lane.get(kind, ())
                  for point in ((x, y - half), (x, y + half), (math.nan, math.nan))]
        axes.plot([x for x, _ in points], [y for _, y in points], color=SERIES[place % len(SERIES)], linewidth=1.5,
                  label=kind)
    for name, (start, end) in bars.items():
        axes.barh(list(lanes).index(name), end - start, 0.7, start, fill=False, edgecolor=INK)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.invert_yaxis()
    _mark(axes, marks)
    upper = axes.secondary_xaxis("top", color=INK)
    upper.set_xticks(list(above.values()), list(above), fontsize=TEXT)
    upper.set_xlabel(labels[1], fontsize=TEXT)
    legend(figure)
    return _closed(figure)


def timeline(trace: Trace, title: str = "") -> Figure:
    """A lane per rank with a bar for each send, receive, collective and computation, on the trace's clock in seconds.

    An operation that never completed is an open bar up to the last time that the trace knows. Raises TraceError for a
    trace without times.
    """
    if not trace.events.has("start_s"):
        raise TraceError("a logical trace has no times to draw: play it instead, or draw the trace it came from")
    figure, axes = blank(0.45 * trace.world_size + 0.7, title)
    drawn = [event for event in trace.events if event.kind in FILLS and event.start_s is not None]
    last_s = max((event.end_s or event.start_s for event in drawn), default=0.0)
    unnamed = dict(KINDS)
    for event in drawn:
        offset = -0.18 if event.kind == "send" else 0.18 if event.kind == "recv" else 0.0
        end_s, color = last_s if event.end_s is None else event.end_s, FILLS[event.kind]
        axes.barh(event.rank + offset, end_s - event.start_s, left=event.start_s, height=0.32, edgecolor=color,
                  color="none" if event.end_s is None else color, label=unnamed.pop(event.kind, ""))
    axes.set_yticks(range(trace.world_size), [f"rank {r}" for r in range(trace.world_size)])
    axes.invert_yaxis()
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _seconds(x)))
    if len(unnamed) < len(KINDS) - 1:  # one kind is named by the title
        legend(figure)
    return _closed(figure)


def svg(figure: Figure) -> str:
    """A figure as SVG, as wide on a page as its PNG, with text as text, and the same in every run."""
    written = io.BytesIO()
    fonts = ["DejaVu Sans", "Verdana", "sans-serif"]  # what a phone has instead is no wider
    with plt.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lockstep", "font.sans-serif": fonts}):
        figure.savefig(written, format="svg", bbox_inches="tight",
                       metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    root = ElementTree.fromstring(written.getvalue())
    used = set(re.findall(r"#(\w+)", written.getvalue().decode()))
    root.set("font-family", ", ".join(fonts))
    _shorten(root, used)
    for side in ("width", "height"):
        root.set(side, f"{float(root.get(side, '').removesuffix('pt')) * DPI / 72:.0f}")
    ElementTree.register_namespace("", SVG)
    return ElementTree.tostring(root, encoding="unicode")


def _shorten(element: ElementTree.Element, used: set[str]) -> None:
    """Keep two decimals, the names that are `used`, what can be seen, and no space that only lays out the file."""
    if not (element.text or "").strip():
        element.text = None
    element.tail = None
    for name, value in list(element.attrib.items()):
        value = " ".join(FAMILY.sub("", value).split())
        element.set(name, value)
        if name in NUMBERS_OF:
            element.set(name, LONG_NUMBER.sub(lambda found: f"{float(found[0]):.2f}", value))
        if (name == "id" and value not in used) or value.startswith("rotate(-0"):
            del element.attrib[name]
    for child in list(element):
        _shorten(child, used)
    kept = [child for child in element if child.get("style") != UNSEEN]
    element[:] = [inner for child in kept for inner in (child if child.tag == GROUP and not child.attrib else [child])]


def _closed(figure: Figure) -> Figure:
    plt.close(figure)  # the notebook shows what the cell returns; left open, it would show it twice
    return figure


def _bytes(x: float) -> str:
    # Not `words.in_bytes`: a tick needs a fourth digit, and notebooks store figures with these letters.
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if x >= size:
            return f"{x / size:.4g} {unit}"
    return f"{x:g} B"


def _seconds(x: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(x) >= size * 0.9999:
            return f"{x / size:.4g} {unit}"
    return f"{x * 1e9:.4g} ns" if x else "0"


def _number(x: float) -> str:
    return f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.4g}"


def _percent(x: float) -> str:
    return f"{100 * x:.3g} %"


UNITS: dict[str, Callable[[float], str]] = {"": _number, "%": _percent, "B": _bytes, "s": _seconds}
