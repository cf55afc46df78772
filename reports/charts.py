"""The pictures of a report: logit error by layer, code widths by layer and by block, and where the bytes go."""

from collections import Counter
from collections.abc import Mapping, Sequence

from kvbench.reports.escaping import shorten
from kvbench.reports.scores import REFERENCE, BitsByUse, number
from kvbench.reports.svg import Element, Figure, LegendEntry, Scale, add, drawing, index_ticks, round_step

Allocation = list[list[list[int]]]
Series = Mapping[str, Sequence[float | None]]

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 14, 44
LOGARITHM_FROM = 50  # a linear axis hides the smaller of two series further apart than this
STYLES = ("series-1", "series-2", "series-3", "series-4", "series-5")


def series_styles(names: Sequence[str]) -> dict[str, str]:
    """A CSS class a name: the reference is grey in every picture, the others take the palette in order."""
    others = [name for name in names if name != REFERENCE]
    return {name: STYLES[i % len(STYLES)] for i, name in enumerate(others)} | {REFERENCE: "series-reference"}


def error_by_layer(series: Series, key: str = "logit-error", rows: Mapping[str, str] | None = None) -> Figure | None:
    """One line a quantizer over the layers. Linear from zero, or logarithmic where the series are far apart.

    The fp16 cache's error is orders of magnitude lower: it lies on the zero of a linear axis and is left out of a
    logarithmic one, which the caption says. ``rows`` gives the row of a comparison that a line belongs to.
    """
    points = {name: [value for value in values if value is not None] for name, values in series.items()}
    scaled = [value for name, values in points.items() if name != REFERENCE for value in values]
    scaled = scaled or [value for values in points.values() for value in values]
    if not scaled or max(scaled) <= 0:
        return None
    logarithmic = min(scaled) > 0 and max(scaled) / min(scaled) > LOGARITHM_FROM
    low, high = (min(scaled) / 1.3, max(scaled) * 1.3) if logarithmic else (0.0, max(scaled) * 1.06)
    drawn = [name for name in series if not (logarithmic and name == REFERENCE) and points[name]]
    count = max(len(series[name]) for name in drawn)
    caption = "Mean absolute logit error of each layer; lower is better."
    if logarithmic:
        left_out = f" The {REFERENCE} cache, near zero, is not drawn." if points.get(REFERENCE) else ""
        caption += f" Logarithmic axis.{left_out}"
    described = "; ".join(f"{name}: {number(min(points[name]))} to {number(max(points[name]))}" for name in drawn)
    root = drawing(key, "Logit error by layer", f"{count} layers. {described}.", WIDTH, HEIGHT)
    x = Scale(0, max(1, count - 1), LEFT + 8, WIDTH - RIGHT - 8)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP, logarithmic)
    frame(root, y, [(x(i), str(i)) for i in index_ticks(count, 10)], "layer", "logit error")
    styles = series_styles(list(series))
    for name in reversed(drawn):  # the quantizer asked for is drawn last, on top
        line = _line(root, name, series[name], x, y, styles[name])
        if rows is not None:
            line.set("data-row", rows[name])
    return Figure(caption, [root], [LegendEntry(styles[name], name) for name in drawn])


def _line(root: Element, name: str, values: Sequence[float | None], x: Scale, y: Scale, style: str) -> Element:
    """A line with a dot a layer; a layer without a value leaves a gap."""
    shown = [(i, v) if v is not None and not (y.logarithmic and v <= 0) else None for i, v in enumerate(values)]
    path, pen = "", "M"
    for point in shown:
        path += f"{pen}{x(point[0]):.1f} {y(point[1]):.1f}" if point else ""
        pen = "L" if point else "M"
    group = add(root, "g", class_=style)
    add(group, "path", class_="line", d=path)
    for i, value in filter(None, shown):
        dot = add(group, "circle", class_="dot", cx=x(i), cy=y(value), r=3)
        add(dot, "title", f"{shorten(name, 40)}, layer {i}: {number(value)}")
    return group


def frame(root: Element, y: Scale, x_labels: Sequence[tuple[float, str]], x_title: str, y_title: str) -> None:
    """Horizontal grid lines with their values, labels below, and both axes' titles."""
    for value in y.ticks():
        add(root, "path", class_="grid", d=f"M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}")
        add(root, "text", f"{value:g}", class_="tick", x=LEFT - 6, y=y(value) + 4, text_anchor="end")
    for at, label in x_labels:
        add(root, "text", label, class_="tick", x=at, y=HEIGHT - BOTTOM + 17, text_anchor="middle")
    middle = (TOP + HEIGHT - BOTTOM) / 2
    add(root, "text", x_title, class_="axis", x=(LEFT + WIDTH - RIGHT) / 2, y=HEIGHT - 6, text_anchor="middle")
    add(root, "text", y_title, class_="axis", transform=f"translate(13 {middle:g}) rotate(-90)", text_anchor="middle")


def widths_used(allocation: Allocation) -> list[int]:
    """The code widths that occur, ascending."""
    return sorted({bits for layer in allocation for head in layer for bits in head})


def width_shares(layer: Sequence[Sequence[int]]) -> dict[int, float]:
    """Share of a layer's blocks, all KV heads together, at each code width."""
    counts = Counter(bits for head in layer for bits in head)
    return {bits: count / counts.total() for bits, count in sorted(counts.items())}


def shares_by_layer(name: str, allocation: Allocation, key: str, row: str = "") -> Figure:
    """A stacked column a layer: the share of its RoPE blocks at each code width, narrow codes at the bottom."""
    used = widths_used(allocation)
    description = f"{len(allocation)} layers; widths from {used[0]} to {used[-1]} bits."
    root = drawing(key, f"Share of blocks at each code width, {shorten(name, 40)}", description, WIDTH, HEIGHT)
    if row:
        root.set("data-row", row)
    pitch = (WIDTH - LEFT - RIGHT) / len(allocation)
    y = Scale(0, 100, HEIGHT - BOTTOM, TOP)
    centres = [(LEFT + (i + 0.5) * pitch, str(i)) for i in index_ticks(len(allocation), 10)]
    frame(root, y, centres, "layer", "share of blocks, %")
    for i, layer in enumerate(allocation):
        below = 0.0
        for bits, share in width_shares(layer).items():
            top = below + 100 * share
            x, width, height = LEFT + (i + 0.08) * pitch, 0.84 * pitch, y(below) - y(top)
            bar = add(root, "rect", class_=f"fill {width_style(bits)}", x=x, y=y(top), width=width, height=height)
            add(bar, "title", f"layer {i}: {100 * share:.0f} % of blocks at {bits} bits")
            below = top
    caption = f"{shorten(name, 60)}: share of each layer's RoPE blocks at each code width, all KV heads together."
    return Figure(caption, [root], width_legend(used))


def shares_by_quantizer(named: Mapping[str, tuple[str, Allocation, str]], key: str) -> Figure:
    """A stacked bar a quantizer: the share of all RoPE blocks at each code width.

    ``named`` gives label, allocation and setting by the row of the comparison.
    """
    pitch, top = 46.0, 6.0
    height = top + pitch * len(named) + 46
    x = Scale(0, 100, 8, WIDTH - 18)
    root = drawing(key, "Share of blocks at each code width", f"{len(named)} allocations.", WIDTH, height)
    for percentage in (0, 25, 50, 75, 100):
        add(root, "path", class_="grid", d=f"M{x(percentage):.1f} {top}V{height - 42}")
        add(root, "text", str(percentage), class_="tick", x=x(percentage), y=height - 26, text_anchor="middle")
    add(root, "text", "share of RoPE blocks, %", class_="axis", x=WIDTH / 2, y=height - 6, text_anchor="middle")
    used: set[int] = set()
    for i, (row, (label, allocation, setting)) in enumerate(named.items()):
        y, start = top + pitch * i, 0.0
        group = add(root, "g", data_row=row)
        add(group, "text", shorten(f"{label}, {setting}", 90), class_="label", x=8, y=y + 14)
        for bits, share in width_shares([head for layer in allocation for head in layer]).items():
            used.add(bits)
            left, right = x(start), x(start + 100 * share)
            style = f"fill {width_style(bits)}"
            bar = add(group, "rect", class_=style, x=left, y=y + 20, width=right - left, height=18)
            add(bar, "title", f"{shorten(label, 40)}: {100 * share:.1f} % of blocks at {bits_text(bits)}")
            start += 100 * share
    caption = "Share of all key RoPE blocks at each code width, all layers and KV heads."
    return Figure(caption, [root], width_legend(sorted(used)))


def width_maps(name: str, allocation: Allocation, key: str) -> Figure:
    """A map a KV head: layers down, RoPE blocks across, coloured by code width."""
    heads = max(len(layer) for layer in allocation)
    maps = [_width_map(head, allocation, f"{key}-head-{head}") for head in range(heads)]
    caption = (
        f"{shorten(name, 60)}: code width of every RoPE block, one map per KV head; "
        "layers from top to bottom, blocks from fast-turning (left) to slow-turning (right)."
    )
    return Figure(caption, maps, width_legend(widths_used(allocation)))


def _width_map(head: int, allocation: Allocation, key: str) -> Element:
    rows = [layer[head] if head < len(layer) else [] for layer in allocation]
    blocks = max(map(len, rows))
    cell_width, cell_height = 208 / max(1, blocks), max(3.0, min(8.0, 240 / len(rows)))
    left, top = 30.0, 22.0
    right, bottom = left + 208, top + cell_height * len(rows)
    title = f"Code widths, KV head {head}"
    root = drawing(key, title, f"{len(rows)} layers of {blocks} RoPE blocks.", right + 6, bottom + 34)
    add(root, "text", f"KV head {head}", class_="axis", x=left, y=14.0)
    paths: dict[int, str] = {}
    for i, row in enumerate(rows):
        for start, length, bits in runs(row):
            x, y, width = left + start * cell_width, top + i * cell_height, length * cell_width
            rectangle = f"M{x:.2f} {y:.2f}h{width:.2f}v{cell_height:.2f}h{-width:.2f}z"
            paths[bits] = paths.get(bits, "") + rectangle
    for bits, path in sorted(paths.items()):
        add(root, "path", class_=f"fill crisp {width_style(bits)}", d=path)
    for i in index_ticks(len(rows), 6):
        y_label = top + (i + 0.5) * cell_height + 4
        add(root, "text", str(i), class_="tick", x=left - 5, y=y_label, text_anchor="end")
    for i in index_ticks(blocks, 5):
        add(root, "text", str(i), class_="tick", x=left + (i + 0.5) * cell_width, y=bottom + 14, text_anchor="middle")
    add(root, "text", "RoPE block", class_="tick", x=(left + right) / 2, y=bottom + 29, text_anchor="middle")
    return root


def runs(row: Sequence[int]) -> list[tuple[int, int, int]]:
    """Equal neighbours as ``(start, length, value)``: a third of the rectangles for the same picture."""
    found: list[tuple[int, int, int]] = []
    for i, value in enumerate(row):
        if found and found[-1][2] == value:
            start, length, _ = found[-1]
            found[-1] = (start, length + 1, value)
        else:
            found.append((i, 1, value))
    return found


def width_style(bits: int) -> str:
    """The CSS class of a code width; 1 to 8 have colours of their own."""
    return f"width-{bits}" if 1 <= bits <= 8 else "width-other"


def bits_text(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"


def width_legend(used: Sequence[int]) -> list[LegendEntry]:
    return [LegendEntry(width_style(bits), bits_text(bits)) for bits in used]


def bits_by_quantizer(uses: Mapping[str, BitsByUse], key: str = "bits") -> Figure:
    """A bar a quantizer: bits per cached element for codes, norms and scales, padding."""
    pitch, top = 46, 6
    height = top + pitch * len(uses) + 46
    longest = max(max(use.total for use in uses.values()), 1e-9)
    step = round_step(longest / 8)
    x = Scale(0, longest, 8, WIDTH - 60)
    described = "; ".join(f"{name}: {number(use.total)} bits" for name, use in uses.items())
    root = drawing(key, "Bits per cached element", described, WIDTH, height)
    for i in range(int(longest / step + 1e-9) + 1):
        add(root, "path", class_="grid", d=f"M{x(i * step):.1f} {top}V{height - 42}")
        add(root, "text", f"{i * step:g}", class_="tick", x=x(i * step), y=height - 26, text_anchor="middle")
    add(root, "text", "bits per element", class_="axis", x=(8 + WIDTH - 60) / 2, y=height - 6, text_anchor="middle")
    for i, (name, use) in enumerate(uses.items()):
        y, start = top + pitch * i, 0.0
        add(root, "text", shorten(name, 60), class_="label", x=8, y=y + 14)
        for part, bits in (("codes", use.codes), ("norms", use.norms), ("padding", use.padding)):
            if bits > 0:
                edges = x(start), x(start + bits)
                bar = add(
                    root, "rect", class_=f"fill use-{part}", x=edges[0], y=y + 20, width=edges[1] - edges[0], height=18
                )
                add(bar, "title", f"{part}: {number(bits)} bits per element")
            start += bits
        add(root, "text", number(use.total), class_="tick", x=x(use.total) + 6, y=y + 34)
    legend = [
        LegendEntry("use-codes", "codes (or 16-bit values)"),
        LegendEntry("use-norms", "norms and scales"),
        LegendEntry("use-padding", "padding and spare capacity"),
    ]
    return Figure("Bits per cached element, keys and values averaged, from allocated bytes.", [root], legend)
