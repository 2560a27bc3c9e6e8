"""Results: one record, tables as they are read, pictures that fit a screen."""

import io
import json
import struct
from collections import defaultdict
from functools import partial

import pytest
from rich.console import Console
from tests.exhaustive import sparing
from tests.tiny import tiny_target

from slipstream.evaluation.report import comparison_result
from slipstream.results import picture
from slipstream.results.picture import draw
from slipstream.results.record import Plot, Result, environment
from slipstream.results.writer import markdown, show, write

ROWS = [{"a": 1234567, "b": 0.123456, "c": None}, {"a": 2, "b": 12345.6, "c": "x"}]


def size_of(path) -> tuple[int, int]:
    """Width and height of a PNG."""
    return struct.unpack(">II", path.read_bytes()[16:24])


def test_markdown_tables():
    assert markdown(Result("T", ROWS)) == (
        "### T\n\n| a | b | c |\n|---|---|---|\n| 1,234,567 | 0.123 | - |\n| 2 | 12,346 | x |\n"
    )
    shown = Result("T", ROWS, more={"U": ROWS}, shown={"V": ROWS[:1]})
    assert markdown(shown).count("###") == 1 and "### V" in markdown(shown)


def test_the_terminal_shows_the_same_tables():
    console = Console(file=io.StringIO(), width=100)
    show(Result("T", ROWS, more={"U": ROWS}), console)
    assert console.file.getvalue().count("1,234,567") == 2


def test_a_record_has_its_configuration_and_what_is_written_before_stays_until_then(tmp_path):
    result = Result("T", ROWS, more={"U": ROWS}, files={"folder/text": "one"})
    for number in range(2):
        write(tmp_path, result, {"number": number}, {"device": "x"})
    content = json.loads((tmp_path / "results.json").read_text())
    assert content == {
        "title": "T",
        "config": {"number": 1},
        "environment": {"device": "x"},
        "results": ROWS,
        "more": {"U": ROWS},
    }
    assert (tmp_path / "folder" / "text").read_text() == "one"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"results.json", "table.md", "folder"}  # nothing unfinished, and no plots


def test_a_table_says_which_additions_its_streams_have(tmp_path):
    named = {"study": {"drafters": ["slipstream/small-streaming", "slipstream/small-sprinter"]}}
    of = partial(environment, tiny_target())
    several = {"1": of(named), "2": of({"seed": 3, "data": None})}
    for place, found in enumerate((of(named), several, of())):
        write(tmp_path / str(place), Result("Found", [{"a": 1}]), {}, found)
    texts = [(tmp_path / str(place) / "table.md").read_text() for place in range(3)]
    assert texts[0] == texts[1] and "Additions" not in texts[2]
    assert texts[0].removeprefix(texts[2]) == (
        "\nAdditions to the paper in `slipstream/small-streaming`: root, pairs, copying (the root "
        "where streams are deferred alone).\n"
    )


@pytest.mark.parametrize(
    ("methods", "sets"),
    sparing([(1, "a"), (22, "ab"), (60, "abc")], lambda methods, sets: methods != 22),
)
def test_a_comparison_of_many_methods_fits_a_screen(tmp_path, methods, sets):
    records = [
        defaultdict(
            lambda: 1,
            {"method": f"method_{number}", "prompt_set": name, "details": ""}
            | {"speedup_vs_transformers": 1 + number / 9, "speedup_vs_transformers_low": 1.0}
            | {"speedup_vs_transformers_high": 2 + number / 9},
        )
        for name in sets
        for number in range(methods)
    ]
    draw(tmp_path / "plot.png", comparison_result(records, [], []))
    width, height = size_of(tmp_path / "plot.png")
    assert width <= 1650 and height <= 1100


def test_a_colour_is_one_name_in_all_panels_and_no_other():
    """Also where a panel lacks some, or has them in another order."""
    found = [("A", "a"), ("A", "b"), ("B", "c"), ("B", "b")]
    rows = [{"x": 1, "y": 2.0, "hue": hue, "panel": panel} for panel, hue in found]
    panels = picture._panels(Plot("x", ("y",), "hue", "panel"), Result("T", rows))
    drawn = [(name, colour) for panel in panels for name, _, colour, _, _ in panel.series()]
    assert [name for name, _ in drawn] == ["a", "b", "b", "c"]
    assert len(set(drawn)) == len({colour for _, colour in drawn}) == 3


@pytest.mark.parametrize("kind", ["line", "bar", "point"])
def test_every_kind_of_plot_is_drawn(tmp_path, kind):
    rows = [
        {"x": x, "y": x / 2, "y, fitted": None if x == 1 else x, "z": 3.0, "hue": hue, "low": 0.1,
         "high": 2.0, "panel": "one"}
        for x in (1, 2, 4)
        for hue in ("this", "that", None)
    ]  # fmt: skip
    plot = Plot(
        "x", (("y", "y, fitted"), "z"), "hue", "panel", kind, {"y": ("low", "high")}, "z", "x", 1.0
    )
    draw(tmp_path / "plot.png", Result("T", rows, (plot, plot)))
    assert size_of(tmp_path / "plot.png")[0] <= 1650
