"""Pictures of results as their plots declare them, no larger than a screen.

Panels stand in rows of up to three; names of colours stand beside the panels, never on them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from slipstream.core.files import write_atomically
from slipstream.results.record import Plot, Result, Rows, cell

DOTS, WIDTH, HEIGHT = 110, 15.0, 10.0
"""Dots per inch, and the largest size in inches: at most 1,650 x 1,100 dots."""
COLUMNS = 3
TICKS = 8
"""Values across that are each named."""
LINE_STYLES = ("-o", "--x", ":^", "-.s")
GREY = dict(color="grey", linewidth=0.8, zorder=0)


@dataclass(frozen=True)
class Panel:
    """One panel of a plot: the columns that are drawn, of which rows; first: the plot's first;
    hues: what has a colour of its own, in any panel of the plot."""

    plot: Plot
    title: str
    columns: tuple[str, ...]
    rows: Rows
    first: bool
    hues: tuple[object, ...]

    @property
    def names(self) -> list[object]:
        """What stands across; of bars from top to bottom."""
        return list(dict.fromkeys(row[self.plot.x] for row in self.rows))

    def series(self) -> Iterator[tuple[str, str, str, str, Rows]]:
        """A name, a column, a colour, a style and the rows of all that is drawn."""
        from matplotlib import colormaps

        hue, columns = self.plot.hue, self.columns
        for number, value in enumerate(self.hues):
            own = [row for row in self.rows if hue is None or row[hue] == value]
            if not own:
                continue
            for place, column in enumerate(columns):
                if hue is None:
                    name = column if len(columns) > 1 else ""
                else:
                    name = value if isinstance(value, str) else f"{hue} {value}"
                    if place:  # "E[N], simulated" beside "E[N]" is called "simulated"
                        name += ", " + column.removeprefix(columns[0]).lstrip(", ")
                each = place if hue is None else number
                colour = colormaps["tab20"](2 * (each % 10) + each // 10 % 2)  # ten, then paler
                known = [row for row in own if row[column] is not None]
                yield name, column, colour, LINE_STYLES[place % len(LINE_STYLES)], known

    def bounds(self, column: str, rows: Rows) -> list[list[float]] | None:
        """Ends of the intervals of a column; None where it has none."""
        ends = self.plot.interval.get(column)
        return ends and [[row[each] for row in rows] for each in ends]


def draw(path: Path, result: Result) -> None:
    """Draw all plots of a result into one file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [panel for plot in result.plots for panel in _panels(plot, result)]
    wide = min(COLUMNS, len(panels))
    high = -(-len(panels) // wide)
    # bars get 0.26 inches of height each, as long as there is room
    height = min(HEIGHT, high * max(3.6, 1.2 + 0.26 * max(map(_count_bars, panels))))
    width = min(WIDTH, 2.0 + (4.6 if wide > 1 else 7.0) * wide)
    figure, axes = plt.subplots(
        high, wide, figsize=(width, height), squeeze=False, layout="constrained"
    )
    for each in axes.flat[len(panels) :]:
        each.set_visible(False)
    for place, (each, panel) in enumerate(zip(axes.flat, panels, strict=False)):
        bars = panel.plot.kind == "bar"
        (_draw_bars if bars else _draw_lines)(each, panel)
        each.set_title(panel.title, fontsize=9)
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=8)
        if place % wide and bars and panel.names == panels[place - 1].names:
            each.tick_params(labelleft=False)  # the same names as beside it
    named = (zip(*each.get_legend_handles_labels(), strict=True) for each in axes.flat)
    handles = {name: handle for pairs in named for handle, name in pairs}
    if len(handles) > 1:
        beside = dict(loc="outside right upper", fontsize=8, frameon=False)
        figure.legend(handles.values(), handles, **beside)
    write_atomically(path, lambda file: figure.savefig(file, dpi=DOTS, format="png"))
    plt.close(figure)


def _panels(plot: Plot, result: Result) -> Iterator[Panel]:
    rows = result.rows if plot.table is None else result.more[plot.table]
    shown = [(each,) if isinstance(each, str) else tuple(each) for each in plot.y]
    if plot.order:
        # over all panels, so that panels side by side have the same names at the same places
        lengths = {row[plot.x]: [] for row in rows}
        for row in rows:
            lengths[row[plot.x]].append(row[shown[0][0]])
        rows = sorted(rows, key=lambda row: fmean(lengths[row[plot.x]]), reverse=True)
    hues = [None] if plot.hue is None else dict.fromkeys(row[plot.hue] for row in rows)
    hues = tuple(hue for hue in hues if (hue is None) == (plot.hue is None))
    values = [None] if plot.panel is None else dict.fromkeys(row[plot.panel] for row in rows)
    for value in values:
        own = [row for row in rows if plot.panel is None or row[plot.panel] == value]
        for columns in shown:
            title = [] if plot.panel is None else [str(value)]
            title += [columns[0]] if len(shown) > 1 or not title else []
            yield Panel(plot, ": ".join(title), columns, own, columns == shown[0], hues)


def _draw_lines(axes, panel: Panel) -> None:
    plot = panel.plot
    for name, column, colour, style, rows in panel.series():
        across, up = [row[plot.x] for row in rows], [row[column] for row in rows]
        style = style[-1] if plot.kind == "point" else style
        if len(rows) > 60 and plot.kind == "line":
            style = style[:-1]
        size = 3 if len(rows) > 12 else 5
        axes.plot(across, up, style, color=colour, markersize=size, label=name)
        if bounds := panel.bounds(column, rows):
            axes.vlines(across, *bounds, color=colour, linewidth=0.9, alpha=0.6)
    for scale, name in ((axes.set_xscale, "x"), (axes.set_yscale, "y")):
        if name in plot.log:
            scale("log")
    # Measured places of points may lie anywhere, and their names over one another.
    if len(places := sorted(panel.names)) <= TICKS and not plot.log and plot.kind != "point":
        axes.set_xticks(places, [cell(place) for place in places])
    if plot.reference is not None and panel.first:
        axes.axhline(plot.reference, **GREY)
    axes.set_xlabel(plot.x, fontsize=8)
    if len(panel.columns) == 1 and panel.columns[0] not in panel.title:
        axes.set_ylabel(panel.columns[0], fontsize=8)


def _count_bars(panel: Panel) -> float:
    """Bars of a panel from top to bottom, and the room between groups of them."""
    each = len(list(panel.series()))
    groups = len(panel.names) if panel.plot.kind == "bar" else 0
    return groups * (each if each == 1 else 0.7 * each + 0.4)


def _draw_bars(axes, panel: Panel) -> None:
    """Lying bars, those of one name together."""
    plot, names, series = panel.plot, panel.names, list(panel.series())
    height = 0.8 / len(series)
    for number, (name, column, colour, _, rows) in enumerate(series):
        ends = lengths = [row[column] for row in rows]
        places = [names.index(row[plot.x]) + (number + 0.5) * height - 0.4 for row in rows]
        axes.barh(places, lengths, height * 0.9, color=colour, label=name)
        if bounds := panel.bounds(column, rows):
            axes.hlines(places, *bounds, color="black", linewidth=1)
            ends = list(map(max, lengths, bounds[1]))
        for end, place, row in zip(ends, places, rows, strict=True) if plot.label else ():
            text = f"{cell(row[column])}, {plot.label} {cell(row[plot.label])}"
            beside = dict(textcoords="offset points", va="center", fontsize=7)
            axes.annotate(text, (end, place), (4, 0), **beside)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.margins(x=0.3 if plot.label else 0.05)
    if plot.log:
        axes.set_xscale("log")
    if plot.reference is not None:
        axes.axvline(plot.reference, **GREY)
    bounded = panel.columns[0] in plot.interval
    across = panel.columns[0].replace("_", " ") + (" (line: 95 %)" if bounded else "")
    axes.set_xlabel(across if len(panel.columns) == 1 else "", fontsize=8)
