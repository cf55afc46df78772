"""The numbers of ``docs/centered-block-gtq.md`` and of the real model in ``docs/quality-tasks.md``, from runs.

    python -m kvbench.reports.centered_page RUNS... --docs docs --data benchmarks/results/centered.json

Writes the data file and the figure, and the tables between the pages' markers. Without runs the pages are made anew
from the data file.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import KvbenchError, ResultError
from kvbench.reports.charts import logarithmic_axis
from kvbench.reports.collect import collect
from kvbench.reports.drawing import Spec, file_of
from kvbench.reports.evidence import Evidence, Row, between, evidence, find, read_evidence, write_evidence
from kvbench.reports.palette import colour
from kvbench.reports.scores import number, percent
from kvbench.reports.table import Cell, Column, Table
from kvbench.results import write_text_atomically
from kvbench.statistics import paired_difference

PAGE, TASKS_PAGE, FIGURE = "centered-block-gtq.md", "quality-tasks.md", "centered-block-gtq.svg"
WIKITEXT = ("train_excerpt", "test_excerpt")
OTHER_TEXT = ("pydoc_calibration", "test_excerpt")
PYDOC = ("pydoc", "pydoc")
BUDGETS = (2.25, 2.5, 3.0, 3.25, 3.5, 4.0, 4.25, 4.5, 5.02)  # blockgtq at four bits takes 5.014
SLACK = 0.4  # bits by which what stands for a family may fall short of a budget
ERROR, PERPLEXITY, KL, TOP1 = (
    "logit_error.mean",
    "perplexity.perplexity",
    "fidelity.kl",
    "fidelity.top1_agreement",
)
QUALITY = {ERROR: "logit error", PERPLEXITY: "perplexity", KL: "KL divergence"}

Choice = Callable[[Row], bool]
FAMILIES: dict[str, Choice] = {
    "tqmse": lambda row: row.is_a("tqmse"),
    "tqmse center=all": lambda row: row.is_a("tqmse", center="all"),
    "blockgtq": lambda row: row.is_a("blockgtq"),
    "blockgtq norm_bits=8": lambda row: row.is_a("blockgtq", norm_bits=8),
    "cblockgtq": lambda row: any(
        row.is_a("cblockgtq", align=align, norm_bits=bits) for align in (1, 4, 16) for bits in (8, 6)
    ),
}


def of_texts(data: Evidence, texts: tuple[str, str], n_sink: int = 0) -> list[Row]:
    """The rows that were calibrated and evaluated on these texts, with so many sinks."""
    return [row for row in data.rows if (row.calibration, row.evaluation, row.n_sink) == (*texts, n_sink)]


def columns(*titles: str, words: int = 1) -> tuple[Column, ...]:
    """Columns of which the first ``words`` are not numeric."""
    return tuple(Column(title, numeric=index >= words) for index, title in enumerate(titles))


def layers_below(row: Row, other: Row) -> str:
    """In how many layers the first has the lower logit error."""
    won = sum(own < others for own, others in zip(row.layers, other.layers, strict=True))
    return f"{won} of {len(row.layers)}"


def with_bits(row: Row) -> str:
    """A row's logit error, and the bits of a key element in brackets."""
    return f"{number(row.metrics[ERROR])} ({row.bits_k:.2f})"


def code_bits_table(data: Evidence) -> Table:
    """Logit error at equal code bits."""
    rows = of_texts(data, WIKITEXT)
    methods: list[tuple[str, str, dict[str, Any]]] = [
        ("tqmse", "tqmse", {}),
        ("tqmse center=all", "tqmse", {"center": "all"}),
        ("blockgtq", "blockgtq", {}),
        ("cblockgtq balance=false", "cblockgtq", {"balance": False}),
        ("cblockgtq", "cblockgtq", {}),
    ]
    lines: list[list[Cell | str]] = []
    for bits in (2, 3, 4):
        found = {title: find(rows, name, needs=ERROR, k_bits=bits, **options) for title, name, options in methods}
        change = found["cblockgtq"].metrics[ERROR] / found["tqmse"].metrics[ERROR] - 1
        below = layers_below(found["cblockgtq"], found["blockgtq"])
        lines.append([str(bits), *map(with_bits, found.values()), percent(change), below])
    return Table(
        "Mean logit error at equal code bits; in brackets the bits a key element, all allocated bytes counted.",
        columns("code bits", *(title for title, _, _ in methods), "cblockgtq vs tqmse", "layers below blockgtq"),
        lines,
    )


def other_text_table(data: Evidence) -> Table:
    """Logit error where calibration was on another kind of text."""
    lines: list[list[Cell | str]] = []
    for bits in (2, 3, 4):
        own = find(of_texts(data, WIKITEXT), "cblockgtq", needs=ERROR, k_bits=bits)
        uniform, block, centred = (
            find(of_texts(data, OTHER_TEXT), name, needs=ERROR, k_bits=bits)
            for name in ("tqmse", "blockgtq", "cblockgtq")
        )
        change = centred.metrics[ERROR] / uniform.metrics[ERROR] - 1
        scores = [number(row.metrics[ERROR]) for row in (uniform, block, centred)]
        lines.append([str(bits), *scores, percent(change), layers_below(centred, block), number(own.metrics[ERROR])])
    return Table(
        "Mean logit error on WikiText-2, calibrated on Python's documentation.",
        columns(
            "code bits",
            "tqmse",
            "blockgtq",
            "cblockgtq",
            "cblockgtq vs tqmse",
            "layers below blockgtq",
            "cblockgtq calibrated on WikiText-2",
        ),
        lines,
    )


def keys_alone(data: Evidence, metric: str) -> list[Row]:
    """Rows whose score differs by their keys alone: values at four bits, unless the score does not depend on them."""
    rows = [row for row in of_texts(data, WIKITEXT) if {ERROR, metric} <= row.metrics.keys()]
    return [row for row in rows if metric == ERROR or row.parameters.get("v_bits") == 4]


def within(rows: Iterable[Row], family: str, budget: float) -> Row | None:
    """The family's row of the lowest logit error whose keys take no more than ``budget`` bits, nor much less."""
    found = [row for row in rows if FAMILIES[family](row) and budget - SLACK < row.bits_k <= budget]
    return min(found, key=lambda row: row.metrics[ERROR], default=None)


def options_of(row: Row) -> str:
    """The options that the row's fit to the budget."""
    told = [f"k_bits={row.parameters['k_bits']:g}"]
    told += [f"{name}={row.parameters[name]}" for name in ("norm_bits", "align") if name in row.parameters]
    return " ".join(told)


def equal_bytes(data: Evidence, metric: str) -> dict[float, dict[str, Row]]:
    """By budget the rows of the families that have one; only budgets at which there is something to compare."""
    rows = keys_alone(data, metric)
    found = {
        budget: {family: row for family in FAMILIES if (row := within(rows, family, budget)) is not None}
        for budget in BUDGETS
    }
    return {budget: families for budget, families in found.items() if len(families) > 1}


def equal_bytes_table(data: Evidence, metric: str) -> Table:
    """One score by budget of a key element's bits, a column a family; the lowest is marked."""
    found = equal_bytes(data, metric)
    families = [family for family in FAMILIES if any(family in rows for rows in found.values())]
    lines: list[list[Cell | str]] = []
    for budget, rows in found.items():
        lowest = min(row.metrics[metric] for row in rows.values())
        line: list[Cell | str] = [f"{budget:g}"]
        for family in families:
            value = rows[family].metrics[metric] if family in rows else None
            line.append("–" if value is None else Cell(number(value), ("lowest",) * (value == lowest)))
        best = rows.get("cblockgtq")
        lines.append([*line, "–" if best is None else options_of(best)])
    title = QUALITY[metric]
    return Table(
        f"{title[0].upper()}{title[1:]} at equal bytes.",
        (*columns("key bits at most", *families), Column("cblockgtq with", numeric=False)),
        lines,
    )


SETTINGS = ((2, 2), (2, 3), (3, 3), (4, 4))


def text_table(data: Evidence) -> Table:
    """Perplexity, KL and agreement with keys and values quantized, no token kept."""
    rows = of_texts(data, WIKITEXT)
    lines: list[list[Cell | str]] = [["–", "fp16", "16.00", *_text_scores(find(rows, "fp16", needs=PERPLEXITY))]]
    for k, v in SETTINGS:
        for name in ("tqmse", "blockgtq", "cblockgtq"):
            row = find(rows, name, needs=PERPLEXITY, k_bits=k, v_bits=v)
            lines.append([f"K{k}V{v}", name, f"{row.bits:.2f}", *_text_scores(row)])
    return Table(
        "Keys and values quantized; bits an element, keys and values, all allocated bytes counted.",
        columns("", "quantizer", "bits", "perplexity", "KL divergence", "top-1 agreement", words=2),
        lines,
    )


def _text_scores(row: Row) -> list[str]:
    return [number(row.metrics[PERPLEXITY]), number(row.metrics[KL]), f"{row.metrics[TOP1]:.3f}"]


def paired_text_table(data: Evidence) -> Table:
    """What cblockgtq's losses and divergences are less blockgtq's, on the same tokens."""
    rows = of_texts(data, WIKITEXT)
    lines: list[list[Cell | str]] = []
    for k, v in SETTINGS:
        own, other = (find(rows, name, needs=PERPLEXITY, k_bits=k, v_bits=v) for name in ("cblockgtq", "blockgtq"))
        lines.append([f"K{k}V{v}", *(difference(own, other, name) for name in ("perplexity.nll", "fidelity.kl"))])
    return Table(
        "cblockgtq less blockgtq on the same tokens, with 95 % bootstrap intervals.",
        columns("", "loss, nats a token", "KL divergence, nats"),
        lines,
    )


def difference(own: Row, other: Row, metric: str) -> str:
    """The mean of paired differences, and its interval."""
    found = paired_difference(own.samples[metric], other.samples[metric])
    return f"{found.mean:+.4f} ({found.low:+.4f} to {found.high:+.4f})"


VARIANTS: dict[str, dict[str, Any]] = {
    "cblockgtq": {},
    "center_flag=true": {"center_flag": True},
    "v=pca": {"v": "pca"},
    "v=pca_wo": {"v": "pca_wo"},
}


def variants_table(data: Evidence) -> Table:
    """The flag and the kinds of values, with and without sinks."""
    lines: list[list[Cell | str]] = []
    for title, options in VARIANTS.items():
        line: list[Cell | str] = [title]
        for n_sink in (0, 4):
            rows = of_texts(data, PYDOC, n_sink)
            row = find(rows, "cblockgtq", needs=PERPLEXITY, k_bits=2, v_bits=2, **options)
            line += [number(row.metrics[PERPLEXITY]), number(row.metrics[KL])]
        lines.append(line)
    return Table(
        "Options of cblockgtq at K2V2 on Python's documentation: no token kept, and the first four in full precision.",
        columns("", "perplexity", "KL divergence", "perplexity, 4 sinks", "KL divergence, 4 sinks"),
        lines,
    )


def agreement_table(data: Evidence) -> Table:
    """Greedy continuations against the unquantized cache's, and paired with blockgtq's."""
    rows = of_texts(data, WIKITEXT)
    lines: list[list[Cell | str]] = []
    names = ("blockgtq", "cblockgtq")
    for k, v in SETTINGS:
        bits = {"k_bits": k, "v_bits": v}
        other, own = (find(rows, name, needs="agreement.agreement", **bits) for name in names)
        for name, row in zip(names, (other, own), strict=True):
            paired = [difference(own, other, f"agreement.{metric}") for metric in ("agreement", "agreed_prefix")]
            lines.append(
                [
                    f"K{k}V{v}",
                    name,
                    f"{row.metrics['agreement.agreement']:.3f}",
                    f"{row.metrics['agreement.agreed_prefix']:.1f}",
                    *(paired if row is own else ("–", "–")),
                ]
            )
    return Table(
        "20 greedy continuations of 128 tokens against the unquantized cache's.",
        columns(
            "",
            "quantizer",
            "same tokens",
            "tokens before the first other",
            "same tokens less blockgtq's",
            "tokens before less blockgtq's",
            words=2,
        ),
        lines,
    )


def ablation_table(data: Evidence) -> Table:
    """What the shipped experiment measures on the default texts."""
    rows = of_texts(data, PYDOC, 4)
    methods: list[tuple[str, str]] = [
        (name, center) for name in ("tqmse", "blockgtq", "cblockgtq") for center in ("none", "all")
    ]
    lines: list[list[Cell | str]] = []
    for name, center in methods:
        line: list[Cell | str] = [f"{name} center={center}"]
        for bits in (2, 3, 4):
            row = find(rows, name, needs=ERROR, k_bits=bits, v_bits=4, center=center)
            line += [with_bits(row), number(row.metrics[KL])]
        lines.append(line)
    heads = [title for bits in (2, 3, 4) for title in (f"{bits} bits: logit error", "KL")]
    return Table(
        "experiment=ablation_centered: logit error (key bits) and KL on Python's documentation.",
        columns("quantizer", *heads),
        lines,
    )


def needles_table(data: Evidence) -> Table:
    """The small preset of niah, by the likelihood of the right answer."""
    rows = [row for row in of_texts(data, PYDOC) if "niah.answer_nll" in row.metrics]
    lines: list[list[Cell | str]] = []
    for name in ("fp16", "cblockgtq", "blockgtq", "tqmse"):
        row = find(rows, name, needs="niah.answer_nll")
        lines.append([name, number(row.metrics["niah.answer_nll"]), f"{row.metrics['niah.score']:.3f}"])
    return Table(
        "task=niah task.niah.preset=small, K2 V2.", columns("quantizer", "answer NLL, nats a token", "score"), lines
    )


FIGURE_WIDTH = 220


def pareto_figure(data: Evidence) -> Spec:
    """Three panels: each score against the bits of a key element, a line a family."""
    points: list[dict[str, Any]] = []
    for metric, title in QUALITY.items():
        for family, belongs in FAMILIES.items():
            lowest = float("inf")
            for row in sorted(filter(belongs, keys_alone(data, metric)), key=lambda row: row.bits_k):
                if row.metrics[ERROR] < lowest:  # of a family's options those that pay for their bytes
                    lowest = row.metrics[ERROR]
                    points.append({"family": family, "bits": round(row.bits_k, 4), title: row.metrics[metric]})
    palette = [colour("series-reference"), *(colour(f"series-{i}") for i in (4, 2, 3, 1))]
    series = {
        "field": "family",
        "type": "nominal",
        "scale": {"domain": list(FAMILIES), "range": palette},
        "legend": {"columns": 5},
    }
    x = {
        "field": "bits",
        "type": "quantitative",
        "title": "bits a key element",
        "scale": {"domain": [2, 5.1], "nice": False},
        "axis": {"grid": False, "tickCount": 4},
    }
    panels = []
    for title in QUALITY.values():
        values = [point[title] for point in points if title in point]
        y = {"field": title, "type": "quantitative", "title": title}
        panels.append(
            {
                "width": FIGURE_WIDTH,
                "height": 240,
                "transform": [{"filter": f"isValid(datum['{title}'])"}],
                "mark": {"type": "line", "point": True},
                "encoding": {
                    "x": x,
                    "y": {**y, **logarithmic_axis(min(values) / 1.2, max(values) * 1.2)},
                    "color": series,
                },
            }
        )
    return {"data": {"values": points}, "hconcat": panels}


def provenance(data: Evidence) -> str:
    """What the numbers were measured on, in a sentence."""
    places = Counter(
        f"{row.device} ({', '.join(f'{name} {version}' for name, version in row.packages.items())})"
        for row in data.rows
    )
    told = " and ".join(f"{count} on {place}" for place, count in places.most_common())
    return (
        f"{data.model} in {data.dtype}, until {data.measured}, kvbench {data.kvbench}, backend reference; "
        f"of {len(data.rows)} settings {told}."
    )


TABLES: dict[str, dict[str, Callable[[Evidence], Table | str]]] = {
    PAGE: {
        "provenance": provenance,
        "equal code bits": code_bits_table,
        "another text": other_text_table,
        "equal bytes: logit error": lambda data: equal_bytes_table(data, ERROR),
        "equal bytes: perplexity": lambda data: equal_bytes_table(data, PERPLEXITY),
        "equal bytes: KL divergence": lambda data: equal_bytes_table(data, KL),
        "keys and values": text_table,
        "paired with blockgtq": paired_text_table,
        "greedy continuations": agreement_table,
        "options": variants_table,
        "ablation": ablation_table,
    },
    TASKS_PAGE: {"needles of the small preset": needles_table},
}


def filled(page: str, text: str, data: Evidence) -> str:
    """The page ``text`` with its tables made of the data."""
    for name, make in TABLES[page].items():
        content = make(data)
        text = between(text, name, content if isinstance(content, str) else content.markdown())
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    """Write data, figure and tables; the exit code is 2 where a run is missing."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.reports.centered_page", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="*", help="folders of runs; none: the data file as it is")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where pages and figure are")
    parser.add_argument("--data", type=Path, default=Path("benchmarks/results/centered.json"), help="the data file")
    given = parser.parse_args(arguments)
    try:
        data = evidence(collect(given.runs).runs) if given.runs else read_evidence(given.data)
        pages = {page: filled(page, _read(given.docs / page), data) for page in TABLES}
        write_evidence(data, given.data)
        write_text_atomically(given.docs / FIGURE, file_of(pareto_figure(data), "Equal bytes", "svg").decode())
        for page, text in pages.items():
            write_text_atomically(given.docs / page, text)
    except KvbenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ResultError(f"cannot read {path}: {error.strerror or error}. Give the folder with --docs.") from error


if __name__ == "__main__":
    sys.exit(main())
