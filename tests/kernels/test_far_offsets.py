"""Kernels where pages lie past 2^31 and 2^32 bytes, and fp16 tensors past as many elements, from where tensors begin.

What is far away is a copy of something small, and what kernels make of both must be the same, bit for bit. An offset
that is computed in 32 bits reads or writes elsewhere, or not at all.
"""

import pytest
import torch
from torch import Tensor

from .packed_formats import tensor_format

pytest.importorskip("triton")

from kvbench.kernels import fp16_attention
from kvbench.kernels.bit_plane_attention import BitPlaneAttention
from kvbench.kernels.bit_plane_packing import BitPlanePacking
from kvbench.kernels.bit_planes import BitPlaneLayout
from kvbench.kernels.tile_attention import NewToken, TileAttention
from kvbench.kernels.tile_encode import TileEncoder
from kvbench.kernels.tile_prefill import TilePrefill
from kvbench.kernels.tiles import TileLayout

ROOM = 2**34  # bytes of the buffer in which things are far apart
SCALING = 128**-0.5

roomy = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.mem_get_info()[1] < 2 * ROOM,
    reason=f"needs a CUDA device with {2 * ROOM // 2**30} GiB",
)
gpu = [pytest.mark.gpu, roomy]
at_distances = pytest.mark.parametrize("distance", [2**31, 2**32], ids=["2^31", "2^32"])


@pytest.fixture(scope="module")
def room() -> Tensor:
    # ones: as good as any bytes, but not those of an empty page, which would hide that the wrong one was read
    return torch.ones(ROOM, dtype=torch.uint8, device="cuda")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype, generator=torch.Generator("cuda").manual_seed(seed))


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device="cuda")


def tiles() -> TileLayout:
    key = tensor_format([[4, 3, 3, 2], [3] * 4], log_norms=True)
    return TileLayout(key, tensor_format([[3] * 4] * 2, seed=50, log_norms=True))


def bit_planes() -> BitPlaneLayout:
    key = tensor_format([[6, 5, 4, 4, 3, 3, 2, 1], [3] * 8], unit=16)
    return BitPlaneLayout(key, tensor_format([[4, 3]] * 2, unit=64, seed=50))


def sequences_apart(room: Tensor, near: Tensor, distance: int) -> Tensor:
    """A copy of pages ``near [3, pages, page_bytes]``, the last sequence at least ``distance`` bytes after the first.

    Half of the smaller distance fits 32 bits as a stride; its multiple does not.
    """
    stride = -(-distance // 2 // near.shape[2]) * near.shape[2]
    far = room.as_strided(near.shape, (stride, near.shape[2], 1))
    return far.copy_(near)


def late_pages(room: Tensor, near: Tensor, distance: int) -> tuple[Tensor, int]:
    """Pages of one sequence of which the last are ``near [1, pages, page_bytes]``, and how many come before them."""
    before = -(-distance // near.shape[2])
    room[: 2**21] = 1  # where offsets would end up that wrap around
    far = room[: (before + near.shape[1]) * near.shape[2]].view(1, -1, near.shape[2])
    far[:, before:] = near
    return far, before


def filled(layout: TileLayout, batch: int, tokens: int) -> Tensor:
    pages = layout.allocate(batch, tokens, "cuda")
    keys, values = (random(batch, tokens, 2, 128, seed=seed) for seed in (1, 2))
    TileEncoder(layout, "cuda")(keys, values, pages, integers(*[0] * batch))
    return pages


def filled_planes(layout: BitPlaneLayout, batch: int, tokens: int) -> Tensor:
    pages, packing = layout.allocate(batch, tokens, "cuda"), BitPlanePacking(layout, "cuda")
    slots = torch.arange(tokens, device="cuda").expand(batch, -1)
    for part, seed in ((packing.keys, 1), (packing.values, 2)):
        part.store(pages, part.codec.encode(random(batch, tokens, 2, 128, seed=seed)), slots)
    return pages


def assert_equal(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    assert all(torch.isfinite(part).all() for part in expected)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class TestTiles:
    pytestmark = gpu

    @at_distances
    def test_decode_attention_of_a_sequence_far_from_the_first(self, room: Tensor, distance: int) -> None:
        layout = tiles()
        near, q = filled(layout, 3, 300), random(3, 8, 128)
        attention = TileAttention(layout, "cuda", splits=2)
        bounds = integers(0, 7, 3), integers(300, 290, 300)
        far = sequences_apart(room, near, distance)
        assert_equal(attention(q, far, *bounds, SCALING), attention(q, near, *bounds, SCALING))

    @at_distances
    def test_decode_attention_to_late_pages(self, room: Tensor, distance: int) -> None:
        layout = tiles()
        near, q = filled(layout, 1, 300), random(1, 8, 128)
        far, before = late_pages(room, near, distance)
        attention = TileAttention(layout, "cuda", splits=2)
        found = attention(q, far, integers(128 * before + 7), integers(128 * before + 300), SCALING)
        assert_equal(found, attention(q, near, integers(7), integers(300), SCALING))

    @at_distances
    @pytest.mark.parametrize("tokens", [1, 200], ids=["append", "prefill"])
    def test_encoding_a_sequence_far_from_the_first(self, room: Tensor, distance: int, tokens: int) -> None:
        layout = tiles()
        near = filled(layout, 3, 400)
        far = sequences_apart(room, near, distance)
        keys, values = (random(3, tokens, 2, 128, seed=seed) for seed in (5, 6))
        before = near.clone()
        for pages in (near, far):
            TileEncoder(layout, "cuda")(keys, values, pages, integers(130, 140, 150))
        assert not torch.equal(near[2], before[2])
        assert torch.equal(far, near)

    @at_distances
    @pytest.mark.parametrize("tokens", [1, 200], ids=["append", "prefill"])
    def test_encoding_into_late_pages(self, room: Tensor, distance: int, tokens: int) -> None:
        layout = tiles()
        near = filled(layout, 1, 400)
        far, late = late_pages(room, near, distance)
        keys, values = (random(1, tokens, 2, 128, seed=seed) for seed in (5, 6))
        before = near.clone()
        TileEncoder(layout, "cuda")(keys, values, near, integers(130))
        TileEncoder(layout, "cuda")(keys, values, far, integers(128 * late + 130))
        assert not torch.equal(near, before)
        assert torch.equal(far[:, late:], near)

    @at_distances
    def test_a_token_stored_on_the_way_into_late_pages(self, room: Tensor, distance: int) -> None:
        layout = tiles()
        near, q = filled(layout, 1, 300), random(1, 8, 128)
        far, late = late_pages(room, near, distance)
        encoder, attention = TileEncoder(layout, "cuda"), TileAttention(layout, "cuda", splits=2)
        keys, values = (random(1, 1, 2, 128, seed=seed) for seed in (5, 6))
        results = []
        for pages, first in ((near, 0), (far, 128 * late)):
            new = NewToken(encoder, keys, values, integers(first + 300))
            results.append(attention(q, pages, integers(first), integers(first + 301), SCALING, new=new))
        assert_equal(results[1], results[0])
        assert torch.equal(far[:, late:], near)

    @at_distances
    def test_prefill_attention_of_a_sequence_far_from_the_first(self, room: Tensor, distance: int) -> None:
        layout = tiles()
        near, q = filled(layout, 3, 400), random(3, 50, 8, 128)
        prefill, starts = TilePrefill(layout, "cuda"), integers(0, 7, 3)
        far = sequences_apart(room, near, distance)
        assert_equal(prefill(q, far, starts, 340, SCALING), prefill(q, near, starts, 340, SCALING))

    @at_distances
    def test_decoding_late_pages(self, room: Tensor, distance: int) -> None:
        layout = tiles()
        near = filled(layout, 1, 256)
        far, late = late_pages(room, near, distance)
        found, expected = (torch.zeros(2, 1, 256, 2, 128, dtype=torch.float16, device="cuda") for _ in range(2))
        TilePrefill(layout, "cuda").decode(far, late, *found)
        TilePrefill(layout, "cuda").decode(near, 0, *expected)
        assert expected.any()
        assert torch.equal(found, expected)

    def test_encoding_and_attending_heads_far_apart_in_the_input(self, room: Tensor) -> None:
        key = tensor_format([[3] * 4] * 4, log_norms=True)
        layout = TileLayout(key, tensor_format([[3] * 4] * 4, seed=50, log_norms=True))
        near = random(1, 1, 4, 128, seed=5)
        far = room.view(torch.float16).as_strided((1, 1, 4, 128), (128, 128, 2**30, 1)).copy_(near)
        for tokens in (1, 2):  # by append and by prefill
            pages = [layout.allocate(1, 128, "cuda") for _ in range(2)]
            for x, target in zip((near, far), pages, strict=True):
                x = x.expand(1, tokens, 4, 128)
                TileEncoder(layout, "cuda")(x, x, target, integers(0))
            assert pages[0].any()
            assert torch.equal(*pages)
        attention = TileAttention(layout, "cuda", splits=1)
        found, expected = (attention(x[:, 0], pages[0], integers(0), integers(1), SCALING) for x in (far, near))
        assert_equal(found, expected)


class TestBitPlanes:
    pytestmark = gpu

    @at_distances
    def test_decode_attention_of_a_sequence_far_from_the_first(self, room: Tensor, distance: int) -> None:
        layout = bit_planes()
        near, q = filled_planes(layout, 3, 300), random(3, 8, 128)
        attention = BitPlaneAttention(layout, "cuda", splits=2)
        bounds = integers(0, 7, 3), integers(300, 290, 300)
        far = sequences_apart(room, near, distance)
        assert_equal(attention(q, far, *bounds, SCALING), attention(q, near, *bounds, SCALING))

    @at_distances
    def test_decode_attention_to_late_pages(self, room: Tensor, distance: int) -> None:
        layout = bit_planes()
        near, q = filled_planes(layout, 1, 300), random(1, 8, 128)
        far, before = late_pages(room, near, distance)
        attention = BitPlaneAttention(layout, "cuda", splits=2)
        found = attention(q, far, integers(128 * before + 7), integers(128 * before + 300), SCALING)
        assert_equal(found, attention(q, near, integers(7), integers(300), SCALING))

    def test_attending_heads_far_apart_in_the_input(self, room: Tensor) -> None:
        layout = bit_planes()
        pages, near = filled_planes(layout, 1, 300), random(1, 4, 128)
        far = room.view(torch.float16).as_strided((1, 4, 128), (128, 2**30, 1)).copy_(near)
        attention = BitPlaneAttention(layout, "cuda", splits=2)
        found, expected = (attention(x, pages, integers(0), integers(300), SCALING) for x in (far, near))
        assert_equal(found, expected)

    @at_distances
    def test_storing_into_late_pages(self, room: Tensor, distance: int) -> None:
        layout = bit_planes()
        near = filled_planes(layout, 1, 300)
        far, late = late_pages(room, near, distance)
        packing, before = BitPlanePacking(layout, "cuda"), near.clone()
        x, slots = random(1, 60, 2, 128, seed=5), torch.arange(110, 170, device="cuda")[None]
        for part in (packing.keys, packing.values):
            encoded = part.codec.encode(x)
            part.store(near, encoded, slots)
            part.store(far, encoded, slots + 128 * late)
        assert not torch.equal(near, before)
        assert torch.equal(far[:, late:], near)


class TestFp16:
    pytestmark = gpu

    def far(self, room: Tensor, near: Tensor, distance: int, offset: int) -> Tensor:
        """``near [a, b, tokens, 128]``, the last of three heads or sequences ``distance`` elements from the first."""
        stride = distance // 2
        strides = (stride, near.shape[2] * 128) if near.shape[0] > 1 else (3 * stride, stride)
        return room.view(torch.float16).as_strided(near.shape, (*strides, 128, 1), offset).copy_(near)

    @at_distances
    @pytest.mark.parametrize("shape", [(3, 1), (1, 3)], ids=["sequences", "heads"])
    @pytest.mark.parametrize("name", fp16_attention.TRITON_SHAPES)
    def test_split_kv(self, room: Tensor, name: str, shape: tuple[int, int], distance: int) -> None:
        near = [random(*shape, 300, 128, seed=seed) for seed in (1, 2)]
        far = [self.far(room, x, distance, place) for x, place in zip(near, (0, 2**20), strict=True)]
        q = random(shape[0], 4 * shape[1], 128)
        expected = fp16_attention.split_kv(name, q, *near)
        assert torch.equal(fp16_attention.split_kv(name, q, *far), expected)

    @at_distances
    @pytest.mark.parametrize("shape", [(3, 1), (1, 3)], ids=["sequences", "heads"])
    def test_append(self, room: Tensor, shape: tuple[int, int], distance: int) -> None:
        near = [random(*shape, 300, 128, seed=seed) for seed in (1, 2)]
        far = [self.far(room, x, distance, place) for x, place in zip(near, (0, 2**20), strict=True)]
        key, value = (random(*shape, 128, seed=seed) for seed in (5, 6))
        before = [x.clone() for x in near]
        for tensors in (near, far):
            fp16_attention.append(key, value, *tensors, integers(*[299] * shape[0]))
        assert not any(torch.equal(x, old) for x, old in zip(near, before, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(far, near, strict=True))


def test_more_tokens_than_the_fp16_kernel_can_address_are_refused() -> None:
    q, k = (torch.empty(shape, dtype=torch.float16, device="meta") for shape in ((1, 4, 128), (1, 1, 2**24, 128)))
    with pytest.raises(ValueError, match="16777216 tokens of head_dim 128"):
        fp16_attention.split_kv("triton-64", q, k, k)
