"""Reports in a headless Chromium: silent, offline, complete, operable, accessible, and safe from hostile names."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbench.reports.collect import Collection, Run, collect
from kvbench.reports.comparison import compare
from kvbench.reports.comparison_html import render_comparison_html
from kvbench.reports.html import render_html
from kvbench.results import write_result

from .example_results import HOSTILE_NAMES, renamed
from .example_runs import run, write_sweep

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

WIDTHS = (360, 820, 1440)  # a phone, a tablet, a desktop; CSS pixels
SERIOUS = ("serious", "critical")
FIGURES = ("pareto", "compression", "layers", "allocation", "energy", "needles", "latency")


@dataclass
class Opened:
    """A page, and what it said and asked for since it was opened."""

    page: "Page"
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


def opened(browser: "Browser", path: Path, width: int, **context: Any) -> Opened:
    page = browser.new_page(viewport={"width": width, "height": 900}, **context)
    view = Opened(page)
    page.on("console", lambda message: view.messages.append(message.text))
    page.on("pageerror", lambda error: view.messages.append(str(error)))
    page.on("dialog", lambda dialog: view.messages.append(f"dialog: {dialog.message}"))
    page.on("request", lambda request: view.requests.append(request.url))
    page.goto(path.as_uri())
    return view


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep with one damaged cell, its comparison, one run's report, and a comparison of hostile names."""
    place = tmp_path_factory.mktemp("reports")
    write_sweep(place / "sweep")
    (place / "sweep" / "damaged").mkdir()
    (place / "sweep" / "damaged" / "result.json").write_text("{")
    (place / "comparison.html").write_text(render_comparison_html(compare(collect([place / "sweep"]))))
    small = Run(place / "result.json", run("cblockgtq", 3))
    (place / "small.html").write_text(render_comparison_html(compare(Collection([small], []))))
    (place / "run.html").write_text(render_html(run("blockgtq", 3)))
    for i, name in enumerate(HOSTILE_NAMES.values()):
        write_result(renamed(name).model_copy(update={"run_id": str(i)}), place / "hostile" / str(i))
    (place / "hostile.html").write_text(render_comparison_html(compare(collect([place / "hostile"]))))
    return place


@pytest.fixture(params=WIDTHS)
def comparison(request: pytest.FixtureRequest, folder: Path, chromium: "Browser") -> Iterator[Opened]:
    view = opened(chromium, folder / "comparison.html", request.param)
    yield view
    view.page.close()


@pytest.fixture
def page(folder: Path, chromium: "Browser") -> "Iterator[Page]":
    view = opened(chromium, folder / "comparison.html", WIDTHS[-1])
    yield view.page
    view.page.close()


def test_it_opens_without_a_word_and_without_a_request(comparison: Opened, folder: Path) -> None:
    comparison.page.wait_for_load_state("networkidle")
    assert comparison.messages == []
    assert comparison.requests == [(folder / "comparison.html").as_uri()]


def enlivened(page: "Page", section: str = "pareto") -> None:
    """Bring a section into view and wait until the page's own Vega has redrawn its first figure."""
    page.locator(f"#section-{section}").scroll_into_view_if_needed()
    page.wait_for_selector(f"#section-{section} figure[data-live]")


def test_every_figure_answers_once_it_is_seen_and_says_nothing(comparison: Opened, folder: Path) -> None:
    page = comparison.page
    page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    for figure in page.locator("figure").all():
        figure.scroll_into_view_if_needed()
    page.wait_for_function("!document.querySelector('figure:not([data-live])')")
    assert comparison.messages == []
    assert comparison.requests == [(folder / "comparison.html").as_uri()]
    for name in FIGURES:
        box = page.locator(f"#section-{name} figure .picture svg").first.bounding_box()
        assert box is not None and min(box["width"], box["height"]) > 50, name


def test_every_figure_is_there_and_has_a_size(comparison: Opened) -> None:
    for name in FIGURES:
        pictures = comparison.page.locator(f"#section-{name} figure .picture svg")
        assert pictures.count() > 0, name
        box = pictures.first.bounding_box()
        assert box is not None, name
        assert min(box["width"], box["height"]) > 50, name


def test_nothing_is_wider_than_the_page(comparison: Opened) -> None:
    wide, page = comparison.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= page


def faults(browser: "Browser", path: Path, width: int, scheme: str, contrast: bool) -> list[str]:
    """What axe finds serious once every fold is open; its contrast rule takes most of its time."""
    view = opened(browser, path, width, color_scheme=scheme, bypass_csp=True)
    view.page.evaluate("for (const details of document.querySelectorAll('details')) details.open = true")
    if path.name != "run.html":
        enlivened(view.page)
    view.page.add_script_tag(content=(resources.files("axe_core_python") / "axe.min.js").read_text(encoding="utf-8"))
    options = {"resultTypes": ["violations"], "rules": {"color-contrast": {"enabled": contrast}}}
    found = view.page.evaluate(f"axe.run(document, {json.dumps(options)})")
    view.page.close()
    assert found["passes"]
    return [
        f"{fault['id']}: {fault['nodes'][0]['html'][:200]}"
        for fault in found["violations"]
        if fault["impact"] in SERIOUS
    ]


@pytest.mark.parametrize("name", ["comparison", "run", "hostile"])
@pytest.mark.parametrize("width", WIDTHS)
def test_axe_finds_no_serious_fault(chromium: "Browser", folder: Path, name: str, width: int) -> None:
    assert faults(chromium, folder / f"{name}.html", width, "light", contrast=False) == []


@pytest.mark.parametrize("name", ["small", "run"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_enough_contrast(chromium: "Browser", folder: Path, name: str, scheme: str) -> None:
    assert faults(chromium, folder / f"{name}.html", WIDTHS[1], scheme, contrast=True) == []


def column(page: "Page", title: str) -> list[str]:
    """The shown cells of a column of the first table."""
    titles = page.locator("#comparison-table thead th").all_inner_texts()
    number = next(i for i, each in enumerate(titles) if each.split("\n")[0].strip() == title) + 1
    return page.locator(f"#comparison-table tbody tr:not(.filtered) > :nth-child({number})").all_inner_texts()


def test_a_click_on_a_heading_sorts_by_numbers_and_a_second_one_turns_round(page: "Page") -> None:
    heading = page.locator("#comparison-table thead button", has_text="perplexity").first
    heading.click()
    rising = [float(text) for text in column(page, "perplexity")]
    heading.click()
    assert rising == sorted(rising)
    assert [float(text) for text in column(page, "perplexity")] == sorted(rising, reverse=True)
    assert page.locator("#comparison-table th[aria-sort=descending]").inner_text().startswith("perplexity")


def test_rows_without_a_number_come_last_in_both_orders(page: "Page") -> None:
    heading = page.locator("#comparison-table thead button", has_text="logit error vs tqmse")
    for _ in range(2):
        heading.click()
        assert column(page, "logit error vs tqmse")[-1] == "–"


def test_headings_sort_by_the_keyboard(page: "Page") -> None:
    page.locator("#comparison-table thead button").first.focus()
    page.keyboard.press("Enter")
    names = column(page, "quantizer")
    assert names == sorted(names)


def wait_for_marks(page: "Page", count: int) -> None:
    """Vega draws when the browser lets it; give up where it does not come to ``count`` marks."""
    figure = "document.querySelector('#section-pareto figure')"
    page.wait_for_function(f"{figure}.querySelectorAll('.mark-symbol.role-mark path').length === {count}")


def test_the_search_box_filters_rows_and_their_marks(page: "Page") -> None:
    enlivened(page)
    wait_for_marks(page, 9)
    page.get_by_label("Search").fill("cblockgtq k2")
    assert [name.split("\n")[0] for name in column(page, "quantizer")] == ["cblockgtq K2 V2"]
    assert page.locator("#filter-count").inner_text() == "1 of 10 rows"
    wait_for_marks(page, 1)
    page.get_by_label("Search").fill("")
    wait_for_marks(page, 9)


def test_a_figure_without_a_row_that_is_shown_is_not_there(page: "Page") -> None:
    page.get_by_label("Search").fill("tqmse k3")
    layers = page.locator("#section-layers figure")
    assert [layers.nth(i).is_visible() for i in range(layers.count())] == [False, True, False]


def test_pointing_at_a_row_marks_it_in_the_figures(page: "Page") -> None:
    enlivened(page)
    wait_for_marks(page, 9)
    page.locator("#comparison-table tbody tr", has=page.get_by_text("blockgtq K3 V3", exact=True)).hover()
    page.wait_for_function(
        "Array.from(document.querySelectorAll('#section-pareto figure .mark-symbol.role-mark path'))"
        ".filter(path => path.getAttribute('stroke') === 'var(--ink)').length >= 1"
    )


def test_pointing_at_a_mark_tells_its_numbers_and_marks_its_row(page: "Page") -> None:
    enlivened(page)
    wait_for_marks(page, 9)
    page.locator("#section-pareto figure").first.locator(".mark-symbol.role-mark path").first.hover()
    assert "bits, logit error" in page.locator(".tooltip").inner_text()
    assert page.locator("#comparison-table tr.marked").count() == 1


def test_the_legend_singles_out_a_quantizer(page: "Page") -> None:
    enlivened(page)
    wait_for_marks(page, 9)
    figure = page.locator("#section-pareto figure").first
    figure.locator(".role-legend-symbol path").first.click()
    page.wait_for_function(
        "Array.from(document.querySelector('#section-pareto figure').querySelectorAll('.mark-symbol.role-mark path'))"
        ".filter(path => path.getAttribute('opacity') === '0.15').length === 6"
    )


def test_the_lists_and_the_baselines_box_filter_too(page: "Page") -> None:
    page.locator("select[name=quantizer]").select_option("tqmse")
    assert len(column(page, "quantizer")) == 3
    page.locator("select[name=quantizer]").select_option("")
    page.get_by_label("Baselines").uncheck()
    assert not any(name.startswith("fp16") for name in column(page, "quantizer"))


def test_a_search_that_matches_nothing_leaves_no_row_and_says_so(page: "Page") -> None:
    page.get_by_label("Search").fill("no such quantizer")
    assert column(page, "quantizer") == []
    assert page.locator("#filter-count").inner_text() == "0 of 10 rows"


def test_a_row_leads_to_its_command_configuration_and_engagement(page: "Page") -> None:
    row = page.locator("#comparison-table tbody tr", has=page.get_by_text("blockgtq K3 V3", exact=True))
    row.locator("a").click()
    told = page.locator("details.run[open]")
    assert told.locator("pre").first.inner_text() == "kvbench quantizer=blockgtq quantizer.k_bits=3 quantizer.v_bits=3"
    for words in ("What the run depended on.", "30 of 30 layers read packed tokens", "Resolved configuration"):
        assert words in told.inner_text()


def test_what_was_left_out_is_on_the_page(page: "Page") -> None:
    assert "damaged: not JSON" in page.locator("#section-left-out").inner_text()


def test_without_script_everything_but_the_controls_is_there(chromium: "Browser", folder: Path) -> None:
    view = opened(chromium, folder / "comparison.html", WIDTHS[-1], java_script_enabled=False)
    assert view.page.locator("#comparison-table tbody tr:visible").count() == 10
    assert not view.page.locator(".controls").is_visible()
    for name in FIGURES:
        assert view.page.locator(f"#section-{name} figure .picture svg").first.is_visible(), name
    assert "bits, logit error" in (view.page.locator("#section-pareto .picture title").first.text_content() or "")
    view.page.close()


def test_it_prints_on_white_with_every_row(chromium: "Browser", folder: Path) -> None:
    view = opened(chromium, folder / "comparison.html", WIDTHS[-1], color_scheme="dark")
    view.page.emulate_media(media="print")
    assert view.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert view.page.locator("#comparison-table tbody tr:visible").count() == 10
    assert not view.page.locator(".controls").is_visible()
    assert len(view.page.pdf()) > 10_000
    view.page.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_hostile_names_do_nothing(chromium: "Browser", folder: Path, width: int) -> None:
    view = opened(chromium, folder / "hostile.html", width)
    view.page.wait_for_load_state("networkidle")
    assert view.messages == []
    assert view.requests == [(folder / "hostile.html").as_uri()]
    assert view.page.locator("script:not([type='application/json'])").count() == 2  # Vega, and the page's own
    assert view.page.locator("img").count() == 0
    wide, page = view.page.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
    assert wide <= page
    view.page.close()


def test_a_script_in_a_section_that_forgot_to_escape_does_not_run(chromium: "Browser", folder: Path) -> None:
    source = (folder / "comparison.html").read_text()
    attack = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title = 'owned'\">"
    (folder / "attacked.html").write_text(source.replace("<main", f"{attack}<main", 1))
    view = opened(chromium, folder / "attacked.html", WIDTHS[0])
    view.page.wait_for_load_state("networkidle")
    assert view.page.title() != "owned"
    assert view.page.locator("#filter-count").inner_text() == "10 of 10 rows"
    view.page.close()
