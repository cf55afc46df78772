"""Unquantized storage as a GPU has it answers as the reference's planes do; on a CPU the library attends likewise."""

import pytest
import torch
from torch import Tensor, nn

from kvbench.attention import kvbench_attention
from kvbench.cache_options import CacheOptions
from kvbench.dense_storage import DenseStorage
from kvbench.kernels.formats import Dense
from kvbench.packed_cache import PackedLayer

HEADS, GROUP, DIM = 2, 3, 32


def states(batch: int, tokens: int, heads: int, seed: int) -> Tensor:
    return torch.randn(batch, heads, tokens, DIM, generator=torch.Generator().manual_seed(seed))


def layer(library: bool, batch: int, **options: object) -> PackedLayer:
    format = Dense(HEADS, DIM, "float32")
    found = PackedLayer(0, format, format, CacheOptions(**options), GROUP)  # type: ignore[arg-type]
    found.lazy_initialization(states(batch, 1, HEADS, 0), states(batch, 1, HEADS, 0))
    if library:
        found.storage = DenseStorage(batch, 4, states(batch, 1, HEADS, 0), states(batch, 1, HEADS, 0))
    return found


def answers(found: PackedLayer, chunks: list[int], starts: list[int]) -> list[Tensor]:
    """Outputs of chunks of those sizes, padding's left out; sequence b begins at slot ``starts[b]``."""
    outputs, past, first = [], 0, torch.tensor(starts)[:, None, None]
    for number, count in enumerate(chunks):
        keys, values = (states(len(starts), count, HEADS, 3 * number + which) for which in (0, 1))
        handle, _ = found.update(keys, values)
        slots = torch.arange(past + count)
        mask = ((slots <= slots[past:, None])[None] & (slots >= first))[:, None]
        query = states(len(starts), count, HEADS * GROUP, 3 * number + 2)
        output, _ = kvbench_attention(nn.Module(), query, handle, handle, mask if any(starts) else None, scaling=0.3)
        outputs.append(output[slots[past:] >= first[:, 0]])
        past += count
    return outputs


@pytest.mark.parametrize("starts", [[0], [7, 0, 3]], ids=["alone", "left-padded"])
@pytest.mark.parametrize("options", [{}, {"n_sink": 2, "recent_window": 3}, {"exact_prefill": True}], ids=str)
def test_the_librarys_attention_is_the_references(options: dict[str, object], starts: list[int]) -> None:
    """Whatever windows are asked for: what is stored is what was given."""
    chunks = [6, 5, 1, 3, 1]
    found, expected = (answers(layer(library, len(starts), **options), chunks, starts) for library in (True, False))
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=2e-6)


def test_it_grows_moves_rows_and_counts_its_bytes() -> None:
    found = layer(True, 2)
    keys, values = states(2, 9, HEADS, 0), states(2, 9, HEADS, 1)
    found.update(keys, values)
    assert found.bytes_allocated() == (2 * HEADS * 9 * DIM * 4,) * 2
    found.batch_repeat_interleave(2)
    assert torch.equal(found.decode()[0], keys.transpose(1, 2).repeat_interleave(2, 0))
    found.crop(-4)
    assert torch.equal(found.decode()[1], values.transpose(1, 2)[:, :5].repeat_interleave(2, 0))
