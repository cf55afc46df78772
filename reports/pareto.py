"""The picture that a choice is made from: effective bits against quality, its Pareto front, and fp16 as a line."""

from collections.abc import Sequence

from kvbench.reports.charts import BOTTOM, HEIGHT, LEFT, LOGARITHM_FROM, RIGHT, STYLES, TOP, WIDTH, frame
from kvbench.reports.comparison import Comparison, Metric, Row, Setting
from kvbench.reports.escaping import shorten
from kvbench.reports.scores import REFERENCE, number
from kvbench.reports.svg import Element, Figure, LegendEntry, Scale, add, drawing, marker_path

SIZE = 5.0
MARKERS = ("circle", "square", "diamond", "triangle", "cross")  # one a style: colour alone tells some readers nothing
NEAR_ZERO = 100  # an error this many times smaller than the others' would take the axis for itself
LABEL_LENGTH = 28
LETTER = 6.6  # mean width of a letter at the size of labels, enough to tell which of them would overlap


def pareto_front(points: Sequence[tuple[float, float]], lower_is_better: bool) -> list[int]:
    """Indices of the points that no other one beats in both bits and quality, by rising bits."""
    sign = 1 if lower_is_better else -1
    order = sorted(range(len(points)), key=lambda i: (points[i][0], sign * points[i][1]))
    front: list[int] = []
    for i in order:
        if not front or sign * points[i][1] < sign * points[front[-1]][1]:
            front.append(i)
    return front


def pareto(comparison: Comparison, setting: Setting, metric: Metric, key: str) -> Figure | None:
    """A mark a row of ``setting``; None where no quantized row has both numbers."""
    rows = [row for row in comparison.rows if row.setting == setting and row.score(metric).value is not None]
    quantized = [row for row in rows if not row.is_reference and row.effective_bits is not None]
    if not quantized:
        return None
    points = [(row.effective_bits or 0.0, row.score(metric).value or 0.0) for row in quantized]
    references = [row for row in rows if row.is_reference]
    levels = [row.score(metric).value or 0.0 for row in references]
    near_zero = metric.lower_is_better and bool(levels) and min(levels) * NEAR_ZERO < min(value for _, value in points)
    if near_zero or metric.reference != REFERENCE:
        levels = []
    x, y = _scales(points, levels)
    title = f"{metric.title} against effective bits, {shorten(comparison.setting_titles[setting], 60)}"
    front = pareto_front(points, metric.lower_is_better)
    described = "; ".join(f"{quantized[i].label}: {points[i][0]:.2f} bits, {number(points[i][1])}" for i in front[:12])
    root = drawing(key, title, f"{len(points)} quantizers. On the front: {described}.", WIDTH, HEIGHT)
    better = "lower" if metric.lower_is_better else "higher"
    frame(root, y, [(x(value), f"{value:g}") for value in x.ticks()], "effective bits per element", metric.title)
    legend = _reference_line(root, levels, references, y)
    path = "".join(f"{'L' if step else 'M'}{x(points[i][0]):.1f} {y(points[i][1]):.1f}" for step, i in enumerate(front))
    add(root, "path", class_="front", d=path)
    names = list(dict.fromkeys(row.name for row in quantized))
    for row, (bits, value) in zip(quantized, points, strict=True):
        style = names.index(row.name) % len(STYLES)
        mark = _marker(root, MARKERS[style], x(bits), y(value), STYLES[style], row.key)
        add(mark, "title", f"{shorten(row.label, 60)}: {bits:.3f} bits, {metric.title} {number(value)}")
    first = dict.fromkeys([*front, *range(len(quantized))])  # the front's labels have the first right to room
    marks = [(quantized[i], x(points[i][0]), y(points[i][1])) for i in first]
    _labels(root, marks, falling=metric.lower_is_better)
    legend += [LegendEntry(STYLES[i % len(STYLES)], name, MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)]
    axis = " Logarithmic axis." if y.logarithmic else ""
    if near_zero:
        axis += f" The {REFERENCE} cache, near zero, is not drawn."
    caption = (
        f"{comparison.setting_titles[setting]}: {metric.title} ({better} is better) against bits per cached element, "
        f"all bytes counted. The line joins the Pareto front.{axis}"
    )
    return Figure(caption, [root], legend)


def _scales(points: Sequence[tuple[float, float]], levels: Sequence[float]) -> tuple[Scale, Scale]:
    """Axes around the points with room at the edges; logarithmic where quality spans orders of magnitude."""
    bits = [point[0] for point in points]
    values = [point[1] for point in points] + [*levels]
    low, high = min(values), max(values)
    logarithmic = low > 0 and high / low > LOGARITHM_FROM
    if logarithmic:
        low, high = low / 1.3, high * 1.3
    else:
        room = (high - low) * 0.08 or max(abs(high), 1e-9) * 0.1
        low, high = (max(0.0, low - room) if low >= 0 else low - room), high + room
    margin = (max(bits) - min(bits)) * 0.06 or 0.5
    x = Scale(min(bits) - margin, max(bits) + margin, LEFT + 8, WIDTH - RIGHT - 8)
    return x, Scale(low, high, HEIGHT - BOTTOM, TOP, logarithmic)


def _reference_line(root: Element, levels: Sequence[float], rows: Sequence[Row], y: Scale) -> list[LegendEntry]:
    """A line at each different level of the fp16 cache; none for errors, which are zero there."""
    for level, row in dict(zip(levels, rows, strict=False)).items():
        if y.logarithmic and level <= 0:
            continue
        group = add(root, "g", class_="series-reference")
        line = add(group, "path", class_="line", d=f"M{LEFT} {y(level):.1f}H{WIDTH - RIGHT}")
        add(line, "title", f"{shorten(row.label, 60)}: {number(level)}")
    return [LegendEntry("series-reference", REFERENCE)] if levels else []


def _marker(root: Element, shape: str, x: float, y: float, style: str, key: str) -> Element:
    group = add(root, "g", class_=f"mark-point {style}", data_row=key)
    add(group, "path", class_="fill", d=marker_path(shape, x, y, SIZE))
    return group


def _labels(root: Element, marks: Sequence[tuple[Row, float, float]], falling: bool) -> None:
    """Names beside their marks, off a ``falling`` or rising front, as many as fit; the others are in the tooltips."""
    placed: list[tuple[float, float, float]] = []
    for row, x, y in marks:
        text = shorten(row.label, LABEL_LENGTH)
        width, right = len(text) * LETTER, x < WIDTH * 0.75
        left = x + 9 if right else x - 9 - width
        baseline = y - 7 if right == falling else y + 16
        if any(abs(baseline - other) < 14 and left < end and start < left + width for start, end, other in placed):
            continue
        placed.append((left, left + width, baseline))
        anchor, at = ("start", x + 9) if right else ("end", x - 9)
        add(root, "text", text, class_="tick", x=at, y=baseline, text_anchor=anchor, data_row=row.key)
