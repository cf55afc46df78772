"""The tutorial is followed literally, and what the documentation says of formats is compared with the formats."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from kvbench import api
from kvbench.kernels.formats import Dense, TensorFormat
from kvbench.peers import PeerFormat, PeerQuantizer
from kvbench.quantizers.tqmse import TQMSE
from kvbench.registry import load_registry
from kvbench.testing import model_geometry, synthetic_calibration

DOCS = Path(__file__).parent.parent / "docs"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, *languages: str) -> list[tuple[str, str]]:
    return [(language, body) for language, body in FENCE.findall((DOCS / page).read_text()) if language in languages]


def follow(folder: Path, command: str) -> str:
    """Run one command of the tutorial in ``folder``; pip installs beside it and leaves this environment alone."""
    words = shlex.split(command)
    site = folder / "site"
    programs = {"pip": ["-m", "pip"], "kvbench": ["-P", "-m", "kvbench"], "pytest": ["-P", "-m", "pytest"]}
    arguments = [sys.executable, *programs[words[0]], *words[1:]]
    if words[:4] == ["pip", "install", "-e", "."]:
        quiet = ["--quiet", "--no-deps", "--no-build-isolation", "--target", str(site)]
        arguments = [sys.executable, "-m", "pip", "install", *quiet, "."]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("KVBENCH_")}
    environment = {**kept, "PYTHONPATH": str(site), "KVBENCH_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_the_tutorial_followed_literally_ends_in_a_full_report(tmp_path: Path) -> None:
    printed = {}
    for language, body in blocks("write-a-quantizer.md", "python", "toml", "sh"):
        if language == "sh":
            printed |= {command: follow(tmp_path, command) for command in body.splitlines()}
        else:
            name = body.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(body)
    assert re.search(r"^myquant +kvbench-myquant +0\.1", printed["kvbench plugins"], re.MULTILINE)
    assert "myquant" in printed["kvbench quantizer=myquant model=random"]
    (report,) = tmp_path.glob("outputs/*/*/report.html")
    assert "affine" in report.read_text()
    assert " passed" in printed["pytest -q test_myquant.py"]
    assert (tmp_path / "kvbench-other" / "pyproject.toml").exists()


def test_the_smallest_plugin_fits_in_forty_lines() -> None:
    (plugin, _) = (body for language, body in blocks("write-a-quantizer.md", "python"))
    assert len(plugin.splitlines()) <= 40


def kinds(cls: type[TensorFormat] = TensorFormat) -> set[str]:
    """Kinds of all of kvbench's formats."""
    own = [each for each in cls.__subclasses__() if each.__module__.startswith("kvbench.")]
    return {each.kind for each in own} | {kind for each in own for kind in kinds(each)}


def test_every_format_and_every_quantizer_is_documented() -> None:
    formats = (DOCS / "formats.md").read_text()
    listed = set(re.findall(r"^\| `(\w+)` \| `(\w+)` \|", formats, re.MULTILINE))
    assert {kind for kind, _ in listed} == kinds() - {PeerFormat.kind}
    assert all(getattr(api, name).kind == kind for kind, name in listed)
    users = {
        name for row in re.findall(r"\| ([^|]*) \|$", formats, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    own = {
        name
        for name, entry in load_registry({}).quantizers.items()
        if entry.distribution == "kvbench" and not issubclass(entry.value, PeerQuantizer)
    }
    assert own <= users


def test_bits_a_number_are_those_of_the_formats() -> None:
    shape = model_geometry(128, layers=1)
    rotated = TQMSE(k_bits=3).fit(synthetic_calibration(shape), shape).key[0]
    levels = tuple(float(level) for level in range(8))
    formats = {
        "`Dense`": Dense(2, 128),
        "`RotatedCodebook`, one group": rotated,
        "`TurboQuantProd`": api.TurboQuantProd(
            TQMSE(k_bits=2).fit(synthetic_calibration(shape), shape).key[0],  # type: ignore[arg-type]
            1,
            api.Fp16Norm(),
        ),
        "`Affine`, whole head": api.Affine(2, 128, 4),
        "`Affine`, groups of 32": api.Affine(2, 128, 2, group=32),
        "`ChannelAffine`, groups of 32 tokens": api.ChannelAffine(2, 128, 2, 32, 64),
        "`NonUniform` by channel, 10 outliers of 8 heads": api.NonUniform(
            8, 128, levels, 10, (((0.0, 1.0),) * 128,) * 8
        ),
        "`NonUniform` by token, likewise": api.NonUniform(8, 128, levels, 10),
        "`Float8`": api.Float8(2, 128, "e4m3", (1.0, 1.0)),
        "`BlockFloat4`, MXFP4": api.BlockFloat4(2, 128, 32, "e8m0"),
        "`BlockFloat4`, NVFP4": api.BlockFloat4(2, 128, 16, "e4m3"),
    }
    table = (DOCS / "formats.md").read_text().partition("## Bits a number")[2].partition("## Codecs")[0]
    said = {name: float(bits) for name, bits in re.findall(r"^\| (`.*?) \| .*?([\d.]+) \|$", table, re.MULTILINE)}
    assert said == {
        name: format.bits_per_token / (format.kv_heads * format.head_dim) for name, format in formats.items()
    }
