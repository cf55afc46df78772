"""The kernel benchmark where there is no GPU, and the figures that were measured where there was one."""

import json
from pathlib import Path

import pytest
import torch

from kvbench.bench import layout_for, markdown
from kvbench.bench_general import exact_layout
from kvbench.cli import main

ROOT = Path(__file__).resolve().parents[2]


RESULTS = ROOT / "benchmarks/results/h200-2026-11-30.json"


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
def test_without_a_gpu_it_says_so_and_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "kernels", "--out", str(tmp_path)]) == 2
    assert "CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize("allocation", ["tqmse-k3v3", "blockgtq-k3v3"])
def test_three_bits_with_all_norms_compress_at_least_4_9_times(allocation: str) -> None:
    layout = layout_for(allocation, kv_heads=8)
    assert 8 * 128 * 2 * 2 / layout.bytes_per_token >= 4.9


def test_the_exact_allocation_spends_three_bits_and_few_percent_of_padding() -> None:
    layout = exact_layout(kv_heads=8)
    formats = layout.key_format, layout.value_format
    assert [format.code_bits for format in formats] == [3, 3]
    assert all(4 <= len(head.groups) <= 6 for head in layout.key_format.heads)
    assert 8 * layout.bytes_per_token <= 1.02 * sum(format.bits_per_token for format in formats)


def test_the_documents_table_is_the_committed_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "table", "--from", str(RESULTS)]) == 0
    table = capsys.readouterr().out.strip()
    assert table == markdown(json.loads(RESULTS.read_text()))
    assert table in (ROOT / "docs/kernels.md").read_text()
