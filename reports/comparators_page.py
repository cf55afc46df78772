"""``docs/comparators.md``: the built-in quantizers compared, and what was published of them held against measurements.

    python -m kvbench.reports.comparators_page RUNS... --docs docs --data benchmarks/results/comparators.json

``RUNS`` are folders with the sweeps ``comparators``, ``comparators_windows``, ``comparators_decode`` and
``comparators_peers`` (``make comparators`` runs them). What the page says comes from the data file alone, which is
written beside it. The peers may have been measured on another machine, which need not have room for their libraries.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbench.errors import KvbenchError, ResultError
from kvbench.reports.collect import collect
from kvbench.reports.comparators_data import ComparatorData, MeasuredRow, comparator_data, find
from kvbench.reports.comparison import METRICS, Comparison, compare
from kvbench.reports.drawing import file_of
from kvbench.reports.pareto import pareto, pareto_front
from kvbench.reports.scores import REFERENCE, number, percent
from kvbench.reports.table import Cell, Column, Table
from kvbench.results import write_text_atomically
from kvbench.statistics import Interval, paired_difference

SWEEPS = ("comparators", "comparators_windows", "comparators_decode", "comparators_peers")
FIGURE = "comparators.svg"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write data, figure and page; the exit code is 2 where the runs are not what they should be."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.reports.comparators_page", description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+", help=f"folders with the sweeps {', '.join(SWEEPS)}")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="where page and figure go")
    parser.add_argument("--data", type=Path, default=Path("benchmarks/results/comparators.json"), help="the data file")
    given = parser.parse_args(arguments)
    try:
        comparisons = [compare(collect([_folder(given.runs, sweep)])) for sweep in SWEEPS]
        data = comparator_data(*comparisons)
        write_text_atomically(given.data, data.model_dump_json(indent=1) + "\n")
        write_text_atomically(given.docs / FIGURE, pareto_picture(comparisons[0]))
        write_text_atomically(given.docs / "comparators.md", page(data))
    except KvbenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _folder(places: Sequence[Path], sweep: str) -> Path:
    """Where a sweep is; the first place where none has it, which is then told of."""
    return next((place / sweep for place in places if (place / sweep).exists()), places[0] / sweep)


def pareto_picture(sweep: Comparison) -> str:
    """Effective bits against perplexity, as the text of an SVG file."""
    metric = next(each for each in METRICS if each.task == "perplexity")
    figure = pareto(sweep, sweep.settings[0], metric)
    if figure is None:
        raise ResultError("the sweep has no quantizer with both bits and perplexity.")
    return file_of(figure.spec, figure.title, "svg").decode()


PAGE = """\
# The methods compared

Every built-in quantizer at 2 and 4 bits, keys and values alike, in {model} ({dtype}), and what was published of some of
them held against what is measured here. `make comparators` runs the sweeps and writes this page; no number in it is
typed by hand. The literature is in [How scores are made](how-scores-are-made.md), the storage in
[The formats](formats.md).

Perplexity is of {windows} windows of {window:,} tokens, logit error of {logit_error_tokens:,} tokens of the same text
({corpus}); the cache is read as it is stored, in chunks of {chunk} tokens. Measured on {measured} on {device},
torch {torch}, kvbench {kvbench}, attention by {backends}. One small model and one text: orders of methods may differ
on others.

## Bits against perplexity

![Effective bits against perplexity](comparators.svg)

{pareto}

*Effective bits*: all bytes allocated for {window:,} tokens, an element. *By count*: what the formats' bit counts alone
say, which is what a long context tends to: a residual of up to {residual} tokens in full precision, as `kivi` keeps
one, weighs less the longer the text. *Front*: no other row has fewer effective bits and lower perplexity (p), or logit
error (l).

## What was published, and what is measured

Differences are of the mean negative log-likelihood a token, in nats, with 95 % bootstrap intervals over blocks of the
same tokens under both. A claim holds where the interval leaves zero out on its side.

### KIVI at 2 bits needs its window of recent tokens

{residual_claim}

A chunk of {chunk} tokens reads itself as coded, so KIVI's own residual plays no part in the first lines: the window of
128 recent tokens is the cache's (`cache.recent_window`), always full. In the last line tokens are read one by one
({decode_tokens:,} of them), the residual is KIVI's own, and what is compared are 128 tokens with the shortest residual
that groups of 32 allow.

### Keys per channel beat keys per token

{channel_claim}

Both code keys in groups of 32 at the same bits, `kivi` along tokens, `int` along dims; values are coded alike.

### TurboQuant-prod has the higher perplexity at equal bits

{prod_claim}

Its logits are unbiased, but their variance is larger, and softmax does not forgive variance.

## Peers

Published implementations, run as they are in the cache that transformers makes of them (`kvbench[peers]`), beside
kvbench's own with the same groups. Their memory is what their tensors take, found by walking them; their scales follow
the model's dtype ({peers.dtype}). All read chunks of {peers.chunk} tokens that see themselves in full precision
(`cache.prefill=exact`), as that cache has it: not comparable with the rows above. The library codes all earlier tokens
anew with every chunk. {peers.windows} windows of {peers.window:,} tokens, on {peers.device}, torch {peers.torch},
{peers.measured}.

{peers_table}
"""


def page(data: ComparatorData) -> str:
    """The page, of the data alone."""
    backends = " and ".join(sorted({row.backend for row in data.sweep}))
    residual = find(data.sweep, "kivi", k_bits=2).parameters["residual"]
    return PAGE.format(
        **data.of.model_dump(),
        logit_error_tokens=data.logit_error_tokens,
        peers=data.of_peers,
        peers_table=_peers_table(data.peers_sweep).markdown(),
        backends=backends,
        residual=residual - 1,
        decode_tokens=data.of.window - 1,
        pareto=_sweep_table(data.sweep).markdown(),
        residual_claim=_claims(residual_pairs(data)),
        channel_claim=_claims(channel_pairs(data)),
        prod_claim=_claims(prod_pairs(data)),
    )


def _sweep_table(rows: Sequence[MeasuredRow]) -> Table:
    quantized = [row for row in rows if row.quantizer != REFERENCE]
    fronts = {
        "p": _front(quantized, lambda row: row.perplexity),
        "l": _front(quantized, lambda row: row.logit_error),
    }
    reference = find(rows, REFERENCE)
    lines = []
    for row in sorted(rows, key=lambda row: (row.effective_bits, row.perplexity)):
        marks = ", ".join(mark for mark, front in fronts.items() if row.label in front)
        lines.append(
            [
                row.label,
                f"{row.effective_bits:.3f}",
                f"{row.counted_bits:.3f}",
                f"{row.ratio:.2f}×",
                number(row.perplexity),
                percent(row.perplexity / reference.perplexity - 1) if row is not reference else "–",
                number(row.logit_error) if row.logit_error is not None else "–",
                marks,
            ]
        )
    titles = ("effective bits", "by count", "ratio", "perplexity", f"vs {REFERENCE}", "logit error")
    columns = (
        Column("quantizer", numeric=False),
        *(Column(title) for title in titles),
        Column("front", numeric=False),
    )
    return Table("By effective bits, fewest first.", columns, lines)


def _peers_table(rows: Sequence[MeasuredRow]) -> Table:
    reference = find(rows, REFERENCE)
    lines = []
    for row in sorted(rows, key=lambda row: (row.effective_bits, row.perplexity)):
        difference = paired_difference(row.nll, reference.nll)
        told = [f"{difference.mean:+.4f}", f"{difference.low:+.4f} to {difference.high:+.4f}"]
        lines.append(
            [
                row.label,
                row.path,
                row.backend,
                f"{row.effective_bits:.3f}",
                f"{row.ratio:.2f}×",
                number(row.perplexity),
                *(["–", "–"] if row is reference else told),
            ]
        )
    columns = (
        *(Column(title, numeric=False) for title in ("quantizer", "path", "stored and read by")),
        *(Column(title) for title in ("effective bits", "ratio", "perplexity", f"nats over {REFERENCE}")),
        Column("95 % interval"),
    )
    return Table("By effective bits, fewest first.", columns, lines)


def _front(rows: Sequence[MeasuredRow], score: Callable[[MeasuredRow], float | None]) -> set[str]:
    scored = [(row, value) for row in rows if (value := score(row)) is not None]
    points = [(row.effective_bits, value) for row, value in scored]
    return {scored[i][0].label for i in pareto_front(points, lower_is_better=True)}


Pair = tuple[str, MeasuredRow, MeasuredRow]
"""What is compared, the side that is claimed to be better, and the other."""


def residual_pairs(data: ComparatorData) -> list[Pair]:
    """KIVI with and without recent tokens in full precision."""
    pairs: list[Pair] = [
        (
            f"kivi K{bits} V{bits}, window of 128, over none",
            find(data.windows_sweep, "kivi", k_bits=bits, recent_window=128),
            find(data.windows_sweep, "kivi", k_bits=bits, recent_window=0),
        )
        for bits in (2, 4)
    ]
    decoded = [find(data.decode_sweep, "kivi", residual=residual) for residual in (128, 32)]
    return [*pairs, ("kivi K2 V2, residual of 128, over 32", decoded[0], decoded[1])]


def channel_pairs(data: ComparatorData) -> list[Pair]:
    """Keys per channel over keys per token, at equal bits and values."""
    return [
        (
            f"kivi K{bits} V{bits} over int, {f'window of {window}' if window else 'no window'}",
            find(data.windows_sweep, "kivi", k_bits=bits, recent_window=window),
            find(data.windows_sweep, "int", k_bits=bits, recent_window=window),
        )
        for bits in (2, 4)
        for window in (0, 128)
    ]


def prod_pairs(data: ComparatorData) -> list[Pair]:
    """TQ-MSE over TurboQuant-prod at equal bits."""
    return [
        (
            f"tqmse over turboquant_prod, K{bits} V{bits}",
            find(data.sweep, "tqmse", k_bits=bits),
            find(data.sweep, "turboquant_prod", k_bits=bits),
        )
        for bits in (2, 4)
    ]


def _claims(pairs: Sequence[Pair]) -> str:
    lines: list[list[Cell | str]] = []
    for what, better, worse in pairs:
        difference = paired_difference(better.nll, worse.nll)
        errors = [number(row.logit_error) if row.logit_error is not None else "–" for row in (better, worse)]
        lines.append(
            [
                what,
                f"{number(better.perplexity)} / {number(worse.perplexity)}",
                " / ".join(errors) if better.logit_error is not None else "–",
                f"{difference.mean:+.4f}",
                f"{difference.low:+.4f} to {difference.high:+.4f}",
                verdict(difference, len(better.nll)),
            ]
        )
    columns = (
        Column("compared", numeric=False),
        Column("perplexity"),
        Column("logit error"),
        Column("difference"),
        Column("95 % interval"),
        Column("claim", numeric=False),
    )
    return Table("The first over the second.", columns, lines).markdown()


def verdict(difference: Interval, pairs: int) -> str:
    """Whether the first, claimed to be better, has the lower loss; a single pair decides nothing."""
    if pairs < 2 or difference.low <= 0 <= difference.high:
        return "not decided"
    return "holds" if difference.mean < 0 else "does not hold"


if __name__ == "__main__":
    sys.exit(main())
