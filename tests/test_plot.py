"""Pictures: plots, and the README's."""
from __future__ import annotations

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from book import collectives, plot
from book.authoring import picture
from book.cost import Link
from book.simulate import simulate
from book.trace import Event, Trace, TraceError
from tests.website import ROOT

PHONE_PX = 360  # of 390, without the margins
TRACE = simulate(collectives.ring_all_reduce(4), 4e6, Link(1e-5, 1e9))


def test_measured_points_and_model_lines_share_a_colour():
    figure = plot.time_against_size([1e3, 1e6], {"ring": [1e-4, 2e-3], "root": [1e-4, 4e-3]}, {"ring": [1e-4, 2e-3]})
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    assert set(lines) == {"ring", "ring, model", "root"}
    assert lines["ring"].get_color() == lines["ring, model"].get_color() != lines["root"].get_color()
    assert lines["ring"].get_ydata().tolist() == [1e-4, 2e-3]


def test_a_timeline_has_a_bar_for_each_message_end():
    axes = plot.timeline(TRACE).axes[0]
    assert len(axes.patches) == 2 * 24
    assert max(bar.get_x() + bar.get_width() for bar in axes.patches) == pytest.approx(TRACE.duration_s)
    with pytest.raises(TraceError, match="no times to draw"):
        plot.timeline(TRACE.logical())


def test_a_timeline_names_its_colours_where_it_has_several():
    figure = plot.timeline(TRACE)
    [named] = figure.legends
    sent = plot.timeline(Trace([Event(0, "send", peer=1, start_s=0.0, end_s=1.0)], 2, "measured", "recorded"))
    assert {text.get_text(): bar.get_facecolor() for text, bar in zip(named.get_texts(), named.get_patches())} == {
        "send": sent.axes[0].patches[0].get_facecolor(), "receive": figure.axes[0].patches[1].get_facecolor()}
    assert not sent.legends


def test_an_operation_that_never_completed_is_an_open_bar():
    hang = Trace([Event(0, "send", peer=1, start_s=0.0, end_s=1.0), Event(1, "recv", peer=0, start_s=0.25)], 2,
                 "measured", "recorded")
    done, waiting = plot.timeline(hang).axes[0].patches
    assert (waiting.get_x(), waiting.get_width()) == (0.25, 0.75)
    assert waiting.get_facecolor()[3] == 0 < done.get_facecolor()[3]


def test_strokes_stand_in_their_lanes_and_a_kind_has_one_colour():
    figure = plot.strokes({"a": {"done": [1.0, 2.0], "lost": []}, "b": {"done": [3.0], "lost": [4.0]}},
                          bars={"b": (0.5, 2.5)}, above={"7": 2.0}, marks={"killed": 1.5}, labels=("s", "step"))
    axes = figure.axes[0]
    done, lost = (line for line in axes.lines if line.get_label() in ("done", "lost"))
    starts = [(x, (low + high) / 2) for line in (done, lost)
              for x, low, high in zip(line.get_xdata()[::3], line.get_ydata()[::3], line.get_ydata()[1::3])]
    assert starts == [(1, 0), (2, 0), (3, 1), (4, 1)] and done.get_color() != lost.get_color()
    (bar,) = axes.patches
    assert (bar.get_x(), bar.get_width(), bar.get_y() + bar.get_height() / 2) == (0.5, 2.0, 1.0)
    (upper,) = axes.child_axes
    assert [tick.get_text() for tick in upper.get_xticklabels()] == ["7"] and upper.get_xlabel() == "step"
    assert figure.number not in plot.plt.get_fignums()


def test_a_figure_is_closed_and_transparent():
    figure = plot.timeline(TRACE)
    assert figure.number not in plot.plt.get_fignums()
    assert figure.patch.get_alpha() == 0


def test_a_notebook_keeps_a_figure_as_svg_with_its_text_and_as_wide_as_the_png():
    def drawn():
        return plot.bars({"tp & pp": {"state": 12.125}, "tp < 8": {"state": 3}}, unit=" GB", digits=3)

    written = drawn()._repr_svg_()
    assert written == drawn()._repr_svg_(), "else each run would change the notebook"
    root = ElementTree.fromstring(written)
    assert {"tp & pp", "tp < 8", "12.125 GB"} <= {element.text for element in root.iter(f"{{{plot.SVG}}}text")}
    png = io.BytesIO()
    drawn().savefig(png, format="png", bbox_inches="tight")
    width, height = plot.plt.imread(io.BytesIO(png.getvalue())).shape[1::-1]
    assert (float(root.get("width")), float(root.get("height"))) == pytest.approx((width, height), abs=1)


@pytest.mark.parametrize("seconds, text", [(0, "0"), (0.00025, "250 µs"), (1e-3, "1 ms"), (2, "2 s")])
def test_times_are_written_in_their_unit(seconds, text):
    assert plot._seconds(seconds) == text


def test_equal_lines_all_stay_visible():
    lines = plot.lines({"1 rank": [3.0, 2.0], "4 ranks": [3.0, 2.0]}, "step", "loss").axes[0].lines
    assert [line.get_label() for line in lines] == ["1 rank", "4 ranks"]
    assert lines[0].get_linewidth() > lines[1].get_linewidth() and lines[1].get_ydata().tolist() == [3.0, 2.0]


def test_stacked_bars_end_in_their_sum_and_others_in_their_value():
    rows = {"stage 0": {"parameters": 2.0, "gradients": 4.0}, "stage 3": {"parameters": 0.5}}
    axes = plot.bars(rows, unit=" GB").axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 2), (0, 0.5), (2, 4), (0.5, 0)]
    assert [text.get_text() for text in axes.texts] == ["6.0 GB", "0.5 GB"]
    axes = plot.bars(rows, stacked=False, digits=2).axes[0]
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 2), (0, 0.5), (0, 4), (0, 0)]
    assert [text.get_text() for text in axes.texts] == ["2.00", "0.50", "4.00", "0.00"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["stage 0", "stage 3"]


def test_matrices_stand_side_by_side_and_what_belongs_to_one_has_one_colour():
    figure = plot.matrices({"up": [("rank 0", 0, 0, 4, 3), ("rank 1", 4, 0, 4, 3)],
                            "down": [("rank 1", 0, 2, 3, 2), ("rank 0", 0, 0, 3, 2)]})
    axes = figure.axes[0]
    upper, lower, right, left = axes.patches
    assert upper.get_facecolor() == left.get_facecolor() != lower.get_facecolor() == right.get_facecolor()
    assert (upper.get_height(), upper.get_width(), lower.get_y()) == (4, 3, 4)
    assert right.get_x() == left.get_x() + 2 > upper.get_x() + 3, "the second matrix is beside the first"
    assert [text.get_text() for text in axes.texts] == ["up", "down"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["rank 0", "rank 1"]
    assert axes.get_aspect() == 1 and axes.yaxis_inverted()


def brightness(color: tuple[float, ...]) -> float:
    """A colour's relative luminance by WCAG 2."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_a_heat_map_has_a_readable_number_in_each_cell_and_an_open_cell_where_there_is_none():
    rows = {"1": {"a": 10.0, "b": 1234.4, "c": None}, "2": {"a": 400.0, "d": 800.0}}
    axes = plot.heat_map(rows, xlabel="x", ylabel="y", without="does\nnot fit").axes[0]
    texts = {text.xy: text for text in axes.texts}
    assert {place: text.get_text() for place, text in texts.items()} == {
        (0, 0): "10", (1, 0): "1,234", (2, 0): "does\nnot fit", (0, 1): "400", (3, 1): "800"}
    cells = {(round(cell.get_x() + 0.48), round(cell.get_y() + 0.46)): cell for cell in axes.patches}
    assert cells.keys() == texts.keys() and [place for place, cell in cells.items() if not cell.get_fill()] == [(2, 0)]
    by_number = sorted((text.get_text().replace(",", ""), place) for place, text in texts.items() if place != (2, 0))
    shades = [brightness(cells[place].get_facecolor()) for _, place in sorted((float(n), p) for n, p in by_number)]
    assert shades == sorted(shades, reverse=True) and len(set(shades)) == 4
    for share in range(101):
        every = plot.heat_map({"": {"low": 0, "at": share, "high": 100}}).axes[0]
        ground, ink = (brightness(plot.plt.matplotlib.colors.to_rgb(color)) for color in (
            every.patches[1].get_facecolor(), every.texts[1].get_color()))
        assert (max(ground, ink) + 0.05) / (min(ground, ink) + 0.05) >= 4.5
    with pytest.raises(ValueError, match="a number in one cell at least"):
        plot.heat_map({"1": {"a": None}})


def test_points_have_the_colour_of_the_line_of_their_name_and_one_entry_in_the_legend():
    figure = plot.graph({"4 ranks": ([1, 2], [0.75, 0.6])}, {"4 ranks": ([1, 2], [0.75, 0.6]), "alone": ([1], [0.5])},
                         xlabel="micro-batches", ylabel="idle", units=("", "%"), log="x")
    axes = figure.axes[0]
    line, its_points, alone = axes.lines
    assert line.get_color() == its_points.get_color() != alone.get_color()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["4 ranks", "alone"]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    assert axes.yaxis.get_major_formatter()(0.375) == "37.5 %"


def test_six_series_of_a_graph_look_different_and_few_points_lie_over_many():
    points = {f"{num} points": (list(range(num)),) * 2 for num in (200, 3, 90, 1, 20)}
    exact, *clouds = plot.graph({"exact": ([0, 1], [0, 1])}, points, xlabel="", ylabel="").axes[0].lines
    assert len({line.get_color() for line in (exact, *clouds)}) == 6
    assert len({line.get_marker() for line in clouds}) == 5
    lowest_first = sorted(clouds, key=lambda line: line.get_zorder())
    assert [line.get_label() for line in lowest_first] == [f"{num} points" for num in (200, 90, 20, 3, 1)]
    assert exact.get_zorder() > max(line.get_zorder() for line in clouds)


def test_a_graph_has_its_marks_and_a_tick_at_every_second_of_many_values():
    caps = [2.0**exponent for exponent in range(8)]
    axes = plot.graph({"ring": (caps, caps), "tree": (caps, caps)}, xlabel="buffer", ylabel="time", units=("B", "s"),
                      log="x", marks={"even": 10}).axes[0]
    assert axes.lines[2].get_xdata()[0] == 10 and [text.get_text() for text in axes.texts] == ["even"]
    assert axes.get_xticks().tolist() == caps[::2] and axes.xaxis.get_major_formatter()(1e6) == "1 MB"
    plain = plot.graph({"a": (caps[:7], caps[:7])}, xlabel="", ylabel="", log="x").axes[0]
    several = plot.graph({"a": ([1, 4], [1, 1]), "b": ([1, 2], [1, 1])}, xlabel="", ylabel="", log="x").axes[0]
    assert several.get_xticks().tolist() == [1, 2, 4]
    assert plain.get_xticks().tolist() == caps[:7] and plain.xaxis.get_major_formatter()(25000) == "25,000"


def test_a_legend_is_read_in_rows():
    figure, axes = plot.blank(2)
    for number in range(4):
        axes.plot([0, 1], [0, number], label=f"rank {number}")
    plot.legend(figure)
    figure.canvas.draw()
    places = {text.get_text(): text.get_window_extent() for text in figure.legends[0].get_texts()}
    in_rows = sorted(places, key=lambda name: (-round(places[name].y0), places[name].x0))
    assert in_rows == ["rank 0", "rank 1", "rank 2", "rank 3"] and places["rank 3"].y1 < places["rank 0"].y0


@pytest.mark.parametrize("lowest, highest", [(256, 2048), (256, 1e6), (0.0015, 0.04), (50, 1000)])
def test_a_logarithmic_axis_has_ticks_however_short_it_is(lowest, highest):
    axes = plot.graph({"batch": ([8, 64], [lowest, highest])}, xlabel="", ylabel="", log="xy").axes[0]
    low, high = axes.get_ylim()
    assert sum(low <= tick <= high for tick in axes.get_yticks()) >= 3


CAPS = [2.0**exponent for exponent in range(8)]
LONG = "An all-reduce on four ranks of one machine, measured and by the model"
FIGURES = {
    "bars": lambda: plot.bars({f"{n} parameters of a model": {"weights": n, "optimizer's state": 2 * n, "gradients": n}
                               for n in (1, 2, 3)}, unit=" GB", title=LONG),
    "graph": lambda: plot.graph({"ring": (CAPS, CAPS), "a tree with two roots": (CAPS, CAPS), "no cuts": (CAPS, CAPS)},
                                xlabel="buffer", ylabel="time", title=LONG, units=("B", "s"), log="xy",
                                marks={"even": 10}),
    "heat_map": lambda: plot.heat_map({str(n): {str(m): 1000.0 * n for m in range(5)} for n in (1, 2)}, xlabel="stages",
                                      ylabel="ranks", title=LONG),
    "lines": lambda: plot.lines({"1 rank": [3.0, 2.0], "4 ranks": [3.0, 2.0]}, "step", "loss", LONG),
    "timeline": lambda: plot.timeline(TRACE, LONG),
    "time_against_size": lambda: plot.time_against_size([1e3, 1e6], {"ring": [1e-4, 2e-3]}, {"ring": [1e-4, 2e-3]},
                                                        LONG),
}


@pytest.mark.parametrize("name", FIGURES)
def test_text_is_twelve_pixels_high_where_a_phone_shrinks_the_figure(name):
    """A notebook stores the picture with whatever stands beyond the axes."""
    figure, stored = FIGURES[name](), io.BytesIO()
    figure.savefig(stored, format="png", bbox_inches="tight")
    width_px = int.from_bytes(stored.getvalue()[16:20], "big")
    texts = [text for text in figure.findobj(plot.plt.Text) if text.get_text()]
    assert len(texts) >= 4
    for text in texts:
        assert text.get_fontsize() / 72 * figure.dpi * PHONE_PX / width_px >= 12, (text.get_text(), width_px)


SVG = "{http://www.w3.org/2000/svg}"


def test_the_picture_shows_the_run_stored_in_chapter_3() -> None:
    assert picture.PICTURE.read_text("utf-8") == picture.draw(), "draw it again: python -m book.authoring picture"
    assert f"({picture.PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text("utf-8")


def test_a_ring_adds_until_each_rank_has_a_complete_chunk_then_copies() -> None:
    panels = picture.panels_of(picture.recorded_run(picture.CHAPTER))
    whole = [sum(mask == 15 for row in held for mask in row) for _, held, _ in panels]
    assert whole == [0, 0, 0, 4, 8, 12, 16]
    assert [title for title, _, _ in panels] == ["start", *(f"step {k}: {does}" for k, does in
                                                           enumerate(["add"] * 3 + ["copy"] * 3, 1))]
    assert [len(came) for _, _, came in panels] == [0] + 6 * [4]


def test_the_picture_has_a_stripe_for_each_contribution() -> None:
    drawn = ElementTree.fromstring(picture.draw()).iter(f"{SVG}rect")
    kinds = [rect.get("class") for rect in drawn]
    panels = picture.panels_of(picture.recorded_run(picture.CHAPTER))
    masks = [mask for _, held, _ in panels for row in held for mask in row]
    for rank in range(4):
        assert kinds.count(f"r{rank}") == sum(mask >> rank & 1 for mask in masks)
    assert kinds.count("cell") == len(masks) and kinds.count("came") == 24


def test_the_picture_brings_its_own_background_in_both_themes() -> None:
    light, dark = picture.themes()
    names = {*picture.SHARED, *(f"r{rank}" for rank in range(4))}
    assert names <= light.keys() and all(light[name] != dark[name] for name in names)
    text = picture.draw()
    before, query, after = text.partition("@media(prefers-color-scheme:dark)")
    assert query and f".card{{fill:{light['bg']};" in before and f".card{{fill:{dark['bg']};" in after
    assert len(text.encode()) < 100_000 and "http" not in text.replace("http://www.w3.org/2000/svg", "")


def test_without_a_recorded_run_there_is_no_picture(tmp_path: Path) -> None:
    notebook = tmp_path / "chapter.ipynb"
    notebook.write_text(json.dumps({"cells": [{"cell_type": "code", "outputs": []}]}), "utf-8")
    with pytest.raises(ValueError, match="no player in chapter.ipynb plays a recorded run"):
        picture.recorded_run(notebook)
