"""Formats are plain data: checked when made, compared by value, named by a digest, complete as JSON."""

import dataclasses
import json

import pytest

from kvbench.kernels.formats import (
    CacheFormat,
    Codebook,
    Dense,
    Fp16Norm,
    Group,
    HaarRotation,
    HeadFormat,
    RotatedCodebook,
    Segment,
)

ONE_BIT = Codebook(1, (-1, 1), 0.5)


def group(*dims: int, seed: int = 0) -> Group:
    return Group(dims, HaarRotation(len(dims), seed), (Segment(len(dims), ONE_BIT),))


def one_head(*groups: Group) -> RotatedCodebook:
    return RotatedCodebook((HeadFormat(groups),))


@pytest.mark.parametrize(
    ("bits", "levels", "scale", "reason"),
    [
        (0, (1,), 1.0, "1 to 8 bits"),
        (9, tuple(range(512)), 1.0, "1 to 8 bits"),
        (2, (-1, 1), 1.0, "4 levels"),
        (1, (1, 1), 1.0, "ascending"),
        (1, (-2048, 1), 1.0, "exceed 2047"),
        (1, (-1, 1), 0.0, "positive"),
        (1, (-1, 1), float("nan"), "positive"),
    ],
)
def test_codebook_that_kernels_could_not_read_is_refused(
    bits: int, levels: tuple[int, ...], scale: float, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Codebook(bits, levels, scale)


def test_segments_must_cover_a_group() -> None:
    with pytest.raises(ValueError, match="cover its 4 dims"):
        Group((0, 1, 2, 3), HaarRotation(4, 0), (Segment(3, ONE_BIT),))


def test_rotation_must_have_the_groups_size() -> None:
    with pytest.raises(ValueError, match="needs a rotation of that size"):
        Group((0, 1), HaarRotation(4, 0), (Segment(2, ONE_BIT),))


@pytest.mark.parametrize("groups", [(group(0, 1), group(1, 2)), (group(0, 1), group(3, 4))])
def test_groups_must_partition_a_head(groups: tuple[Group, ...]) -> None:
    with pytest.raises(ValueError, match="partition"):
        one_head(*groups)


def test_heads_of_a_layer_must_have_one_size() -> None:
    with pytest.raises(ValueError, match="one head_dim"):
        RotatedCodebook((HeadFormat((group(0, 1),)), HeadFormat((group(0, 1, 2, 3),))))


def test_key_and_value_must_have_as_many_layers() -> None:
    with pytest.raises(ValueError, match="1 key formats but 2"):
        CacheFormat((Dense(1, 2),), (Dense(1, 2), Dense(1, 2)))


def test_unknown_dense_type_is_refused() -> None:
    with pytest.raises(ValueError, match="not int8"):
        Dense(1, 2, "int8")


def test_equal_formats_have_equal_digests() -> None:
    assert one_head(group(0, 1)).digest() == one_head(group(0, 1)).digest()


@pytest.mark.parametrize(
    "other",
    [
        one_head(group(1, 0)),
        one_head(group(0, 1, seed=1)),
        one_head(dataclasses.replace(group(0, 1), norm=Fp16Norm(2.0))),
        one_head(dataclasses.replace(group(0, 1), segments=(Segment(2, Codebook(1, (-1, 1), 0.25)),))),
        Dense(1, 2),
    ],
    ids=["order of dims", "seed", "norm scale", "codebook", "kind"],
)
def test_whatever_changes_the_bytes_meaning_changes_the_digest(other: RotatedCodebook) -> None:
    assert other.digest() != one_head(group(0, 1)).digest()


def test_key_and_value_formats_are_not_interchangeable_in_the_digest() -> None:
    dense, rotated = Dense(1, 2), one_head(group(0, 1))
    assert CacheFormat((dense,), (rotated,)).digest() != CacheFormat((rotated,), (dense,)).digest()


def test_description_is_json_and_names_the_kind() -> None:
    description = json.loads(json.dumps(one_head(group(0, 1)).describe()))
    assert description["kind"] == "rotated_codebook"
    assert description["heads"][0]["groups"][0]["dims"] == [0, 1]


def test_bits_count_codes_and_norms() -> None:
    format = one_head(group(0, 1), group(2, 3, 4, 5, 6, 7, 8, 9))
    assert format.code_bits == 1.0
    assert format.bits_per_token == 10 + 2 * 16
    assert format.row_bytes == 2


def test_widths_are_given_in_the_order_of_dims() -> None:
    wide = Group((3, 0), HaarRotation(2, 0), (Segment(2, Codebook(2, (-3, -1, 1, 3), 0.3)),))
    assert HeadFormat((wide, group(1, 2))).widths() == (2, 1, 1, 2)
