"""The HTML report: the right numbers, self-contained, accessible, and indifferent to hostile names."""

import re
from typing import ClassVar

import pytest

from kvbench.reports import charts
from kvbench.reports.html import render_html
from kvbench.reports.section import ReportSection
from kvbench.reports.sections import SECTIONS
from kvbench.results import Result, TaskRecord

from .example_results import HOSTILE_NAMES, KV_HEADS, LAYERS, allocation, measurement, renamed, result
from .parsed_page import ParsedPage


@pytest.fixture(scope="module")
def page() -> ParsedPage:
    return ParsedPage(render_html(result()))


def test_summary_shows_size_and_quality_of_the_quantizer_asked_for(page: ParsedPage) -> None:
    row = page.row("Ratio", "blockgtq")
    assert row["ratio"] == "4.41×"
    assert row["effective bits K"] == "3.625"
    assert row["logit error"] == "2.406 simulated"
    assert row["vs tqmse"] == "-43.6 %"
    assert row["perplexity"] == "27.43 simulated"
    assert row["vs fp16"] == "+10.0 %"


def test_summary_lists_the_quantizer_asked_for_before_its_baselines(page: ParsedPage) -> None:
    rows = next(rows for caption, rows in page.tables.items() if caption.startswith("Ratio"))
    assert [row[0] for row in rows[1:]] == ["blockgtq", "fp16", "tqmse"]


def test_references_have_no_change_against_themselves(page: ParsedPage) -> None:
    assert page.row("Ratio", "tqmse")["vs tqmse"] == "–"
    assert page.row("Ratio", "tqmse")["vs fp16"] == "+30.6 %"
    assert page.row("Ratio", "fp16")["vs fp16"] == "–"


def test_packed_numbers_are_not_marked() -> None:
    tasks = {name: record.model_copy(update={"path": "packed"}) for name, record in result().tasks.items()}
    row = ParsedPage(render_html(result(tasks=tasks))).row("Ratio", "blockgtq")
    assert (row["logit error"], row["perplexity"]) == ("2.406", "27.43")


def test_packed_beside_simulated_is_called_out() -> None:
    tasks = {name: record.model_copy(update={"path": "packed"}) for name, record in result().tasks.items()}
    assert "Packed and simulated numbers stand side by side" in ParsedPage(render_html(result(tasks=tasks))).text


def test_a_peers_numbers_are_marked_and_explained() -> None:
    tasks = {name: record.model_copy(update={"path": "peer"}) for name, record in result().tasks.items()}
    page = ParsedPage(render_html(result(tasks=tasks)))
    assert page.row("Ratio", "blockgtq")["perplexity"] == "27.43 peer"
    assert "peer: keys and values went through another library's cache" in page.text


def test_unequal_code_bits_are_called_out() -> None:
    unequal = result(baselines={"tqmse": measurement("tqmse", 4, 2.2, 26.0)})
    assert "blockgtq uses K3 V3 code bits, tqmse K4 V4" in ParsedPage(render_html(unequal)).text


def test_compression_splits_the_bits_that_were_allocated(page: ParsedPage) -> None:
    row = page.row("Bits per element, and bytes", "blockgtq")
    assert row["tokens"] == "4,096"
    assert (row["norms"], row["padding"], row["effective bits"]) == ("0.5000", "0.1250", "3.625")
    assert row["bytes allocated"] == f"{result().compression.bytes_allocated:,}"  # type: ignore[union-attr]


def layers_marked(page: ParsedPage) -> int:
    """Marks with a tooltip in the figure of logit error."""
    return len(re.findall(r"(?:blockgtq|fp16|tqmse), layer \d+: ", page.text))


def test_logit_error_of_every_layer_is_in_the_table_and_in_the_picture(page: ParsedPage) -> None:
    values = result().tasks["logit_error"].metrics["per_layer"]
    rows = page.tables["Logit error of each layer."]
    assert [float(row[1]) for row in rows[1:]] == pytest.approx(values, rel=1e-3)
    assert layers_marked(page) == 3 * LAYERS
    assert f"blockgtq, layer 7: {rows[8][1]}" in page.text


def test_every_layer_has_a_column_and_every_kv_head_a_map(page: ParsedPage) -> None:
    columns = re.findall(r"layer \d+: \d+ % of blocks at \d+ bit", page.text)
    layers, widths = allocation(), range(1, 9)
    assert len(columns) == sum(any(b in head for head in layer) for layer in layers for b in widths)
    assert all(f"KV head {head}" in page.text for head in range(KV_HEADS))


def test_the_width_maps_cover_every_block_once() -> None:
    drawn = charts.width_maps("blockgtq", allocation()).spec["data"]["values"]
    covered = [
        (each["layer"], each["head"], block, each["width"])
        for each in drawn
        for block in range(each["from"], each["to"])
    ]
    expected = [
        (layer, f"KV head {head}", block, charts.bits_text(bits))
        for layer, heads in enumerate(allocation())
        for head, widths in enumerate(heads)
        for block, bits in enumerate(widths)
    ]
    assert sorted(covered) == sorted(expected)


def test_perplexity_table_says_how_it_was_measured(page: ParsedPage) -> None:
    row = page.row("Perplexity of", "tqmse")
    assert [row[name] for name in ("perplexity", "tokens", "windows", "stride")] == [
        "32.58 simulated",
        "4,096",
        "8",
        "512",
    ]


def test_engagement_is_shown_for_every_layer(page: ParsedPage) -> None:
    assert "blockgtq: 30 of 30 layers read packed tokens; backend reference" in page.text
    assert "fp16: 0 of 30 layers read packed tokens" in page.text
    assert page.row("tqmse: what each layer", "0 to 29")["packed tokens read"] == "4,096"


def test_layers_that_did_otherwise_have_a_line_of_their_own() -> None:
    changed = result()
    assert changed.cache is not None
    changed.cache.engagement[4].note = "excluded"
    changed.cache.engagement[4].packed_tokens_read = 0
    page = ParsedPage(render_html(changed))
    assert page.row("blockgtq: what each layer", "4")["note"] == "excluded"
    assert page.row("blockgtq: what each layer", "0 to 3")["note"] == "–"
    assert "blockgtq: 29 of 30 layers" in page.text


def test_the_run_can_be_repeated_from_the_report(page: ParsedPage) -> None:
    run = result()
    assert run.command in page.text
    assert '"stride": 512' in page.text
    facts = dict(page.tables["What the run depended on."])
    assert facts["run"] == run.run_id
    assert facts["model fingerprint"] == run.model.fingerprint
    assert facts["torch"] == "2.13.0"
    assert facts["corpus evaluation_sha256"] == run.corpus["evaluation_sha256"]


@pytest.mark.parametrize("status", ["failed", "oom"])
def test_a_failed_task_is_shown_with_its_reason(status: str) -> None:
    failed = TaskRecord(status=status, error="out of reach", metrics={"perplexity": 1.0})  # type: ignore[arg-type]
    page = ParsedPage(render_html(result(tasks={"perplexity": failed})))
    assert page.row("Ratio", "blockgtq")["perplexity"] == status
    assert page.row("Ratio", "blockgtq")["vs fp16"] == "–"
    assert page.row("Ratio", "blockgtq")["logit error"] == "not run"
    assert f"blockgtq, task perplexity: {status}. out of reach" in page.text
    assert any(span.get("class") == "value bad" for span in page.attributes("span"))


def test_a_partial_number_is_marked_and_not_compared() -> None:
    record = result().tasks["perplexity"].model_copy(update={"status": "partial"})
    row = ParsedPage(render_html(result(tasks={"perplexity": record}))).row("Ratio", "blockgtq")
    assert (row["perplexity"], row["vs fp16"]) == ("27.43 simulated partial", "–")


def test_a_task_that_reported_no_number_says_so() -> None:
    row = ParsedPage(render_html(result(tasks={"perplexity": TaskRecord(status="ok")}))).row("Ratio", "blockgtq")
    assert row["perplexity"] == "not reported"


def test_a_baseline_that_ran_out_of_memory_is_a_row() -> None:
    lost = measurement("tqmse", 3, 0, 0, status="oom", error="3 GiB asked", compression=None, cache=None, tasks={})
    page = ParsedPage(render_html(result(baselines={"tqmse": lost})))
    assert page.row("Ratio", "tqmse")["ratio"] == "not measured"
    assert page.row("Ratio", "tqmse")["logit error"] == "oom"
    assert "tqmse: oom. 3 GiB asked" in page.text


def test_a_run_that_measured_nothing_still_has_a_report() -> None:
    nothing = result(status="failed", error="boom", compression=None, cache=None, tasks={}, baselines={})
    page = ParsedPage(render_html(nothing))
    assert "blockgtq: failed. boom" in page.text
    assert page.count("figure") == 2  # the allocation, which was made before the failure


def test_a_baseline_of_the_same_name_does_not_replace_the_quantizer_asked_for() -> None:
    page = ParsedPage(render_html(result(baselines={"blockgtq": measurement("blockgtq", 4, 1.1, 26.0)})))
    assert page.row("Ratio", "blockgtq")["perplexity"] == "27.43 simulated"
    assert page.row("Ratio", "blockgtq (baseline)")["perplexity"] == "26.00 simulated"


def test_errors_far_apart_are_drawn_on_a_logarithmic_axis() -> None:
    apart = result(
        baselines={"tqmse": measurement("tqmse", 3, 900.0, 40.0), "fp16": measurement("fp16", 16, 0.002, 24.9)}
    )
    page = ParsedPage(render_html(apart))
    assert "Logarithmic axis. The fp16 cache, near zero, is not drawn." in page.text
    assert layers_marked(page) == 2 * LAYERS


def test_a_layer_without_a_value_leaves_a_gap() -> None:
    gapped = result()
    gapped.tasks["logit_error"].metrics["per_layer"][3] = None
    page = ParsedPage(render_html(gapped))
    assert layers_marked(page) == 3 * LAYERS - 1
    assert page.tables["Logit error of each layer."][4][1] == "–"


def test_the_page_needs_nothing_from_outside_and_runs_no_script() -> None:
    source = render_html(result())
    assert not re.search(r"https?:|//\w|@import|url\(", source)
    page = ParsedPage(source)
    assert page.count("script") == page.count("link") == page.count("img") == 0
    policy = next(a["content"] for a in page.attributes("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_light_dark_and_print_are_styled() -> None:
    source = render_html(result())
    assert "@media screen and (prefers-color-scheme: dark)" in source
    assert "@media print" in source
    assert "color-scheme: light dark" in source


def _luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _contrast(first: str, second: str) -> float:
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_lines_have_enough_contrast(scheme: int) -> None:
    block = re.findall(r":root \{(.*?)\}", render_html(result()), re.DOTALL)[scheme]
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", block))
    for ink in ("ink", "muted", "accent", "bad"):
        assert _contrast(colours[ink], colours["page"]) >= 4.5, ink
    assert _contrast(colours["warn"], colours["warn-page"]) >= 4.5
    assert _contrast(colours["muted"], colours["surface"]) >= 4.5
    for name in (name for name in colours if name.startswith("series")):
        assert _contrast(colours[name], colours["page"]) >= 3, name


def test_structure_is_there_for_screen_readers(page: ParsedPage) -> None:
    assert all(page.count(landmark) == 1 for landmark in ("header", "nav", "main", "footer", "h1"))
    assert page.attributes("html")[0]["lang"] == "en"
    scopes = [heading.get("scope") for heading in page.attributes("th")]
    rows = sum(len(rows) - 1 for rows in page.tables.values())
    assert scopes.count("row") == rows
    assert scopes.count("col") == sum(len(rows[0]) for rows in page.tables.values()) == len(scopes) - rows
    assert page.count("table") == page.count("caption")
    assert page.count("figure") == page.count("figcaption") == 4
    pictures = [svg for svg in page.attributes("svg") if svg.get("aria-hidden") != "true"]
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for picture in pictures:
        assert picture["role"] == "img"
        assert set((picture["aria-labelledby"] or "").split()) <= set(ids)


def test_every_link_leads_to_a_section(page: ParsedPage) -> None:
    ids = {attributes.get("id") for _, attributes in page.elements}
    links = [link["href"] or "" for link in page.attributes("a")]
    assert len(links) > len(SECTIONS)
    assert {link[1:] for link in links} <= ids


def test_the_page_is_well_formed(page: ParsedPage) -> None:
    assert page.unbalanced == []


@pytest.mark.parametrize("name", HOSTILE_NAMES.values(), ids=HOSTILE_NAMES)
def test_a_hostile_name_adds_no_element(name: str) -> None:
    hostile, harmless = ParsedPage(render_html(renamed(name))), ParsedPage(render_html(renamed("a" * len(name))))
    assert hostile.unbalanced == []
    assert hostile.count("script") == hostile.count("img") == 0
    without_breaks = [[tag for tag, _ in page.elements if tag != "span"] for page in (hostile, harmless)]
    assert without_breaks[0] == without_breaks[1]


@pytest.mark.parametrize("name", [HOSTILE_NAMES["right-to-left"], HOSTILE_NAMES["terminal"]])
def test_no_control_or_override_character_reaches_the_page(name: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", render_html(renamed(name)))


def test_a_long_name_is_cut_where_it_would_push_the_layout() -> None:
    page = ParsedPage(render_html(renamed(HOSTILE_NAMES["long"])))
    headings = [row[0] for rows in page.tables.values() for row in rows]
    assert max(map(len, headings)) <= 60
    assert HOSTILE_NAMES["long"] in page.text  # whole in the configuration


class Broken(ReportSection):
    name: ClassVar[str] = "broken <b>"
    title: ClassVar[str] = "Broken"

    def html(self, result: "Result") -> str:
        raise RuntimeError("no <data> here")


class Extra(ReportSection):
    name: ClassVar[str] = "extra"
    title: ClassVar[str] = "From a plugin"

    def html(self, result: "Result") -> str:
        return "<p>extra body</p>"


class Inapplicable(Extra):
    title: ClassVar[str] = "Not for this result"

    def html(self, result: "Result") -> str:
        return ""


def test_a_section_that_raises_says_so_and_the_rest_is_there() -> None:
    page = ParsedPage(render_html(result(), [Broken, *SECTIONS, Extra]))
    assert "This section could not be rendered: RuntimeError: no <data> here" in page.text
    assert "extra body" in page.text
    assert page.row("Ratio", "blockgtq")["ratio"] == "4.41×"
    assert page.unbalanced == []


def test_a_section_that_returns_no_text_says_so() -> None:
    class Silent(Extra):
        def html(self, result: "Result") -> str:
            return None  # type: ignore[return-value]

    assert "html() returned NoneType, not str" in ParsedPage(render_html(result(), [Silent])).text


def test_sections_of_one_name_have_anchors_of_their_own() -> None:
    ids = [section["id"] for section in ParsedPage(render_html(result(), [Extra, Extra])).attributes("section")]
    assert ids == ["section-extra", "section-extra-2"]


def test_a_section_that_does_not_apply_leaves_no_heading() -> None:
    assert "Not for this result" not in render_html(result(), [Inapplicable])
