"""Figures as files: whole without a stylesheet, with every name as text."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from kvbench.reports.collect import collect
from kvbench.reports.comparison import Comparison, compare
from kvbench.reports.comparison_figures import FIGURES
from kvbench.reports.standalone import light_colours, standalone_pictures
from kvbench.results import write_result

from .example_results import HOSTILE_NAMES, renamed
from .example_runs import write_sweep

SVG = "{http://www.w3.org/2000/svg}"
SHAPES = {f"{SVG}{tag}" for tag in ("path", "rect", "circle")}


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    return compare(collect([write_sweep(tmp_path_factory.mktemp("sweep"))]))


def pictures(comparison: Comparison, name: str) -> list[ET.Element]:
    return [ET.fromstring(text) for figure in FIGURES[name](comparison) for text in standalone_pictures(figure)]


@pytest.mark.parametrize("name", FIGURES)
def test_every_shape_and_text_has_a_colour_of_its_own(sweep: Comparison, name: str) -> None:
    found = pictures(sweep, name)
    assert found
    for picture in found:
        assert picture.get("viewBox") == f"0 0 {picture.get('width')} {picture.get('height')}"
        for element in picture.iter():
            assert element.get("class") is None
            assert element.get("style") is None
            if element.tag in SHAPES or element.tag == f"{SVG}text":
                assert element.get("stroke") or element.get("fill") != "none"
                assert element.get("fill") is not None


def test_series_keep_the_colours_of_the_page(sweep: Comparison) -> None:
    strokes = {element.get("stroke") for element in pictures(sweep, "layers")[0].iter(f"{SVG}path")}
    assert {light_colours()[f"series-{i}"] for i in (1, 2, 3)} <= strokes


def test_the_legend_is_in_the_picture(sweep: Comparison) -> None:
    texts = [element.text for element in pictures(sweep, "pareto")[0].iter(f"{SVG}text")]
    assert {"blockgtq", "cblockgtq", "tqmse"} <= set(texts)


def test_exporting_leaves_the_pages_figure_alone(sweep: Comparison) -> None:
    figure = FIGURES["pareto"](sweep)[0]
    before = figure.html()
    standalone_pictures(figure)
    assert figure.html() == before


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_a_hostile_name_adds_no_element(name: str, tmp_path: Path) -> None:
    write_result(renamed(name), tmp_path)
    compared = compare(collect([tmp_path]))
    tags = {
        element.tag.removeprefix(SVG)
        for kind in FIGURES
        for each in pictures(compared, kind)
        for element in each.iter()
    }
    assert tags <= {"svg", "title", "desc", "g", "path", "rect", "circle", "text"}
