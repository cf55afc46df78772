"""Figures as files and in pages: every colour known, every name as text, no file that needs another."""

import json
import re
import struct
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvbench.reports.charts import logarithmic_axis
from kvbench.reports.collect import collect
from kvbench.reports.comparison import Comparison, compare
from kvbench.reports.comparison_figures import FIGURES
from kvbench.reports.drawing import PIXELS_A_UNIT, SVG, file_of, picture
from kvbench.reports.figure import Figure
from kvbench.reports.palette import DARK, LIGHT, colour, painted
from kvbench.results import write_result

from .example_results import HOSTILE_NAMES, renamed
from .example_runs import write_sweep

COLOURS = {*LIGHT.values(), "none", "transparent", "currentColor"}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(collect([write_sweep(tmp_path_factory.mktemp("sweep"))]))


def svg_files(comparison: Comparison, name: str) -> list[ET.Element]:
    return [ET.fromstring(file_of(figure.spec, figure.title, "svg")) for figure in FIGURES[name](comparison)]


@pytest.mark.parametrize("name", FIGURES)
def test_an_svg_file_has_the_light_colours_and_needs_no_stylesheet(sweep: Comparison, name: str) -> None:
    found = svg_files(sweep, name)
    assert found
    for root in found:
        assert float(root.get("width", "0")) > 400
        assert root.find(f"{{{SVG}}}title") is not None
        used = {element.get(what) for element in root.iter() for what in ("fill", "stroke") if element.get(what)}
        assert used <= COLOURS


def test_quantizers_keep_the_colours_of_the_page(sweep: Comparison) -> None:
    strokes = {element.get("stroke") for element in svg_files(sweep, "layers")[0].iter(f"{{{SVG}}}path")}
    assert {LIGHT[f"series-{i}"] for i in (1, 2, 3)} <= strokes


def test_the_legend_is_in_the_picture(sweep: Comparison) -> None:
    texts = [element.text for element in svg_files(sweep, "pareto")[0].iter(f"{{{SVG}}}text")]
    assert {"blockgtq", "cblockgtq", "tqmse"} <= set(texts)


def test_a_png_is_three_times_the_figures_size(sweep: Comparison) -> None:
    figure = FIGURES["compression"](sweep)[0]
    content = file_of(figure.spec, figure.title, "png")
    assert content.startswith(b"\x89PNG")
    width = float(svg_files(sweep, "compression")[0].get("width", "0"))
    assert struct.unpack(">I", content[16:20])[0] == pytest.approx(PIXELS_A_UNIT * width, abs=PIXELS_A_UNIT)


def test_a_pdf_is_one_page(sweep: Comparison) -> None:
    figure = FIGURES["pareto"](sweep)[0]
    content = file_of(figure.spec, figure.title, "pdf")
    assert content.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) == 1


def test_a_picture_in_a_page_has_no_colour_of_its_own(sweep: Comparison) -> None:
    drawn = "".join(picture(figures(sweep)[0].spec) for figures in FIGURES.values())
    assert not re.search(r"#[0-9a-fA-F]{6}", drawn)
    assert set(re.findall(r"var\(--([\w-]+)\)", drawn)) <= set(LIGHT)


def test_a_colour_that_is_not_in_the_palette_is_an_error() -> None:
    assert LIGHT.keys() == DARK.keys()
    with pytest.raises(KeyError):
        colour("mauve")


def test_painting_replaces_colours_wherever_they_stand_and_nothing_else() -> None:
    spec = {"range": [colour("ink"), "other"], "axis": {"labelColor": colour("rule"), "title": "var(--ink"}}
    expected = {"range": [LIGHT["ink"], "other"], "axis": {"labelColor": LIGHT["rule"], "title": "var(--ink"}}
    assert painted(spec) == expected


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.08, 300, [0.1, 1, 10, 100]),
        (0.3, 12, [0.5, 1, 2, 5, 10]),
        (4000, 9000, [4000, 5000, 6000, 8000]),
        (1e-7, 3e-7, [1e-7, 1.5e-7, 2e-7, 3e-7]),
    ],
)
def test_a_logarithmic_axis_has_round_values_whatever_it_spans(low: float, high: float, ticks: list[float]) -> None:
    assert logarithmic_axis(low, high)["axis"]["values"] == ticks


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_a_hostile_name_adds_no_element(name: str, tmp_path: Path) -> None:
    write_result(renamed(name), tmp_path)
    compared = compare(collect([tmp_path]))
    tags = {
        element.tag.removeprefix(f"{{{SVG}}}")
        for kind in FIGURES
        for root in svg_files(compared, kind)
        for element in root.iter()
    }
    assert tags <= {"svg", "title", "g", "path", "rect", "line", "text", "defs", "clipPath"}


def test_what_a_page_carries_for_its_script_is_inert(tmp_path: Path) -> None:
    figure = Figure("t", "d", "c", {"mark": "bar", "data": {"values": [{"x": "</script><b>\u2028é"}]}})
    source = figure.html(live=True)
    carried = source.split('<script type="application/json">')[1].split("</script>")[0]
    assert carried.isascii()
    assert "<" not in carried
    assert json.loads(carried)["data"]["values"] == [{"x": "</script><b>\u2028é"}]
