"""How quantizers look in figures: each as no other, however many there are."""

from kvbench.reports.scores import REFERENCE
from kvbench.reports.series import STYLES, series_encoding


def test_no_two_of_many_quantizers_share_colour_and_shape_or_dash() -> None:
    names = {name: name for name in [REFERENCE, *(f"quantizer {i}" for i in range(STYLES**2))]}
    encoding = series_encoding(names)
    colours, shapes, dashes = (encoding[channel]["scale"]["range"] for channel in ("color", "shape", "strokeDash"))
    assert len(set(zip(colours, shapes, strict=True))) == len(names)
    assert len(set(zip(colours, map(tuple, dashes), strict=True))) == len(names)


def test_few_quantizers_have_a_colour_each() -> None:
    encoding = series_encoding({name: name for name in [REFERENCE, *"abcde"]})
    assert len(set(encoding["color"]["scale"]["range"])) == 1 + STYLES
