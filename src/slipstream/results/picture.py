"""Pictures of results as their plots declare them, no larger than a screen.

Panels stand in rows of up to three; names of colours stand beside the panels, never on them.
"""

from collections.abc import Sequence
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


def draw(path: Path, result: Result) -> None:
    """Draw all plots of a result into one file."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [panel for plot in result.plots for panel in _panels(plot, result)]
    wide = min(COLUMNS, len(panels))
    high = -(-len(panels) // wide)
    # bars get 0.26 inches of height each, as long as there is room
    bars = max((_count_bars(*panel) for panel in panels), default=0)
    height = min(HEIGHT, high * max(3.6, 1.2 + 0.26 * bars))
    width = min(WIDTH, 2.0 + (4.6 if wide > 1 else 7.0) * wide)
    figure, axes = plt.subplots(
        high, wide, figsize=(width, height), squeeze=False, layout="constrained"
    )
    handles: dict[str, object] = {}
    for place, panel in enumerate(axes.flat):
        if place >= len(panels):
            panel.set_visible(False)
            continue
        plot, _, _, _ = own = panels[place]
        (_draw_bars if plot.kind == "bar" else _draw_lines)(panel, *own, handles)
        panel.spines[["top", "right"]].set_visible(False)
        panel.tick_params(labelsize=8)
        if place % wide and plot.kind == "bar" and _names(own) == _names(panels[place - 1]):
            panel.tick_params(labelleft=False)  # the same names as beside it
    if len(handles) > 1:
        figure.legend(
            handles.values(), handles, loc="outside right upper", fontsize=8, frameon=False
        )
    write_atomically(path, lambda file: figure.savefig(file, dpi=DOTS, format="png"))
    plt.close(figure)


def _panels(plot: Plot, result: Result) -> list[tuple[Plot, str, tuple[str, ...], Rows]]:
    """The plot, a title, the columns and the rows of each panel."""
    rows = result.rows if plot.table is None else result.more[plot.table]
    if plot.order:
        # over all panels, so that panels side by side have the same names at the same places
        column = next(iter(_flat(plot.y)))
        lengths = {row[plot.x]: [] for row in rows}
        for row in rows:
            lengths[row[plot.x]].append(row[column])
        rows = sorted(rows, key=lambda row: fmean(lengths[row[plot.x]]), reverse=True)
    parts = {"": rows}
    if plot.panel is not None:
        parts = {
            str(value): [row for row in rows if row[plot.panel] == value]
            for value in dict.fromkeys(row[plot.panel] for row in rows)
        }
    found = []
    for name, part in parts.items():
        for each in plot.y:
            columns = (each,) if isinstance(each, str) else tuple(each)
            title = columns[0] if len(plot.y) > 1 or not name else ""
            found.append((plot, ": ".join(filter(None, [name, title])), columns, part))
    return found


def _flat(columns: Sequence[str | tuple[str, ...]]) -> list[str]:
    return [name for each in columns for name in ((each,) if isinstance(each, str) else each)]


def _series(plot: Plot, columns: Sequence[str], rows: Rows) -> list[tuple[str, str, str, Rows]]:
    """A name, the place of a colour, a style and rows for all that is drawn in a panel."""
    hues = [None]
    if plot.hue is not None:
        hues = [hue for hue in dict.fromkeys(row[plot.hue] for row in rows) if hue is not None]
    found = []
    for number, hue in enumerate(hues):
        own = [row for row in rows if plot.hue is None or row[plot.hue] == hue]
        for place, column in enumerate(columns):
            words = [] if hue is None else [_name(plot.hue, hue)]
            # "E[N], simulated" beside "E[N]" is called "simulated"
            own_name = column.removeprefix(columns[0]).lstrip(", ") if hue is not None else column
            words += [own_name] if len(columns) > 1 and own_name else []
            colour = number if plot.hue is not None else place
            style = LINE_STYLES[place % len(LINE_STYLES)]
            found.append((", ".join(words), column, f"C{colour % 10}", style, own))
    return found


def _name(column: str, value: object) -> str:
    return value if isinstance(value, str) else f"{column} {value}"


def _draw_lines(axes, plot: Plot, title: str, columns, rows: Rows, handles: dict) -> None:
    for name, column, colour, style, own in _series(plot, columns, rows):
        known = [row for row in own if row[column] is not None]
        across, up = [row[plot.x] for row in known], [row[column] for row in known]
        style = style[-1] if plot.kind == "point" else style
        size = 3 if len(known) > 12 else 5
        if len(known) > 60 and plot.kind == "line":
            style = style[:-1]
        (line,) = axes.plot(across, up, style, color=colour, markersize=size, label=name)
        handles.setdefault(name, line)
        if plot.interval and column == columns[0]:
            bounds = [[row[each] for row in known] for each in plot.interval]
            axes.vlines(across, *bounds, color=colour, linewidth=0.9, alpha=0.6)
        if plot.label:
            for row in known:
                place = row[plot.x], row[column]
                beside = dict(textcoords="offset points", fontsize=7)
                axes.annotate(cell(row[plot.label]), place, (4, 4), **beside)
    for scale, name in ((axes.set_xscale, "x"), (axes.set_yscale, "y")):
        if name in plot.log:
            scale("log")
    places = sorted({row[plot.x] for row in rows})
    if len(places) <= TICKS and not plot.log:
        axes.set_xticks(places, [cell(place) for place in places])
    if plot.reference is not None and columns[0] == _flat(plot.y)[0]:
        axes.axhline(plot.reference, **GREY)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(plot.x, fontsize=8)


def _names(panel) -> list[object]:
    """What the bars of a panel are called, from top to bottom."""
    plot, _, _, rows = panel
    return list(dict.fromkeys(row[plot.x] for row in rows))


def _count_bars(plot: Plot, title: str, columns, rows: Rows) -> float:
    """Bars of a panel from top to bottom, and the room between groups of them."""
    if plot.kind != "bar":
        return 0
    groups = len({row[plot.x] for row in rows})
    each = len(_series(plot, columns, rows))
    return groups * (each if each == 1 else 0.7 * each + 0.4)


def _draw_bars(axes, plot: Plot, title: str, columns, rows: Rows, handles: dict) -> None:
    """Lying bars, those of one name together."""
    names = _names((plot, title, columns, rows))
    series = _series(plot, columns, rows)
    height = 0.8 / len(series)
    for number, (name, column, colour, _, own) in enumerate(series):
        known = [row for row in own if row[column] is not None]
        lengths = [row[column] for row in known]
        places = [names.index(row[plot.x]) + (number + 0.5) * height - 0.4 for row in known]
        bars = axes.barh(places, lengths, height * 0.9, color=colour, label=name)
        handles.setdefault(name, bars)
        ends = lengths
        if plot.interval and column == columns[0]:
            bounds = [[row[each] for row in known] for each in plot.interval]
            axes.hlines(places, *bounds, color="black", linewidth=1)
            ends = list(map(max, lengths, bounds[1]))
        if plot.label:
            for end, place, row in zip(ends, places, known, strict=True):
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
    axes.set_title(title, fontsize=9)
    across = columns[0].replace("_", " ") + (" (line: 95 %)" if plot.interval else "")
    axes.set_xlabel(across if len(columns) == 1 else "", fontsize=8)
