"""The command line as a user meets it: what it prints, where it writes, and how it says no."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

import kvbench
from kvbench.cli import main
from kvbench.command_line import flags_first
from kvbench.kernels.fp16_attention import available
from kvbench.results import read_result

from .small_run import SMALL_RUN, command_environment

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Distribution = Callable[..., Path]

BROKEN = "import no_such_module"
PLUGIN = """
@dataclass(frozen=True)
class Mine(DenseFit, Quantizer):
    '''Keeps everything in fp16, for tests.'''
    name: ClassVar[str] = "mine"
    needs_calibration: ClassVar[bool] = False
    mood: str = "calm"

    def __post_init__(self):
        if self.mood == "sulky":
            raise ConfigurationError("quantizer.mood=sulky is not allowed: choose another.")
        if self.mood == "furious":
            raise RuntimeError("a defect")

    def fit(self, calibration, geometry):
        if self.mood == "angry":
            raise RuntimeError("a defect")
        return super().fit(calibration, geometry)

@hookimpl
def kvbench_quantizers():
    return [Mine]
"""


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: exit code, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["quantizer=blockgtp"], "Did you mean 'blockgtq'?"),
        (["model=smollm2-135"], "Did you mean 'smollm2-135m'?"),
        (["task=[perplexty]"], "Did you mean 'perplexity'?"),
        (["corpus=pydocs"], "Did you mean 'pydoc'?"),
        (["baselines=[fp17]"], "unknown quantizer 'fp17'. Did you mean 'fp16'?"),
        (["hydra/launcher=jobli"], "Did you mean 'joblib'?"),
        (["quantizer.k_bits=0"], "quantizer.k_bits=0"),
        (["quantizer.k_bits=9"], "1 to 8"),
        (["quantizer.k_bits=-1"], "quantizer.k_bits=-1"),
        (["quantizer.k_bits=three"], "quantizer.k_bits=three is not allowed: it must be a number"),
        (["threads=many"], "threads=many is not allowed: it must be a whole number"),
        (["model.random=perhaps"], "it must be true or false"),
        (["baselines=fp16"], "baselines must be a list"),
        (["quantizer.kbits=3"], "Did you mean 'quantizer.k_bits'?"),
        (["quantiser=fp16"], "Did you mean 'quantizer'?"),
        (["task=[perplexity]", "task.logit_error.tokens=64"], "task 'logit_error' is not selected"),
        (["task=[]"], "no task was chosen"),
        (["quantizer.k_bits=="], "cannot read 'quantizer.k_bits=='"),
        (["task=[perplexity"], "cannot read 'task=[perplexity'"),
        (["quantizer=fp16,tqmse"], "add -m for a sweep"),
        (["quantizer=null"], "must be a string"),
        (["device=${nowhere}"], "nowhere"),
        (["plugin"], "Did you mean 'plugins'?"),
        (["--colour"], "unrecognized arguments: --colour"),
        (["--config-dir", "missing"], "missing' not found"),
        (["-m", "quantizer.kbits=2,3"], "Did you mean 'quantizer.k_bits'?"),
        (["-m", "quantizer.k_bits=2,3", "hydra.launcher.jobs=0"], "hydra.launcher.jobs=0"),
    ],
)
def test_bad_input_ends_with_code_2_and_two_lines(
    call: Callable[..., tuple[int, str, str]], arguments: list[str], said: str
) -> None:
    code, out, err = call(*arguments)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) <= 2
    assert err.startswith("kvbench: ")
    assert out == ""


@pytest.mark.parametrize("option", ["hydra.run.dir", "hydra.sweep.dir"])
def test_an_output_folder_that_cannot_be_written_is_named(
    call: Callable[..., tuple[int, str, str]], tmp_path: Path, option: str
) -> None:
    (tmp_path / "file").write_text("in the way")
    flags = ["-m"] if option == "hydra.sweep.dir" else []
    code, _, err = call(*flags, f"{option}=file/out")
    assert code == 2
    assert "file/out: Not a directory" in err
    assert "hydra.run.dir=DIR" in err
    assert len(err.strip().splitlines()) == 1


def test_a_model_folder_that_is_not_there_is_named(command: Command) -> None:
    done = command([*SMALL_RUN, "model=local", "model.path=no/such/folder"])
    assert done.returncode == 2
    assert "no/such/folder" in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


def test_the_plugin_that_is_broken_is_named_when_its_quantizer_is_asked_for(
    command: Command, distribution: Distribution
) -> None:
    done = command(["quantizer=clever"], distribution(BROKEN, "clever"))
    assert done.returncode == 2
    unknown, broken = done.stderr.strip().splitlines()
    assert "unknown quantizer 'clever'" in unknown
    assert "plugin 'clever' is broken: ModuleNotFoundError: No module named 'no_such_module'" in broken


def test_a_plugin_s_own_refusal_reaches_the_user(command: Command, distribution: Distribution) -> None:
    done = command(["quantizer=mine", "quantizer.mood=sulky"], distribution(PLUGIN))
    assert (done.returncode, done.stderr) == (2, "kvbench: quantizer.mood=sulky is not allowed: choose another.\n")


def test_full_error_adds_the_traceback(command: Command) -> None:
    done = command(["quantizer=nosuch"], HYDRA_FULL_ERROR="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("kvbench: unknown quantizer 'nosuch'")


def test_a_defect_shows_its_traceback_and_ends_with_code_1(command: Command, distribution: Distribution) -> None:
    done = command([*SMALL_RUN, "quantizer=mine", "quantizer.mood=furious"], distribution(PLUGIN))
    assert done.returncode == 1
    assert "RuntimeError: a defect" in done.stderr
    assert "report it" in done.stderr


def test_a_plugin_that_fails_in_fit_is_named_and_its_traceback_shown_on_request(
    command: Command, distribution: Distribution
) -> None:
    site = distribution(PLUGIN)
    done = command([*SMALL_RUN, "quantizer=mine", "quantizer.mood=angry"], site)
    said, way_out = done.stderr.splitlines()
    assert done.returncode == 2
    assert re.fullmatch(r"kvbench: quantizer 'mine' \(\w+\) failed in fit\(\): RuntimeError: a defect\.", said)
    assert way_out == "HYDRA_FULL_ERROR=1 shows where."
    done = command([*SMALL_RUN, "quantizer=mine", "quantizer.mood=angry"], site, HYDRA_FULL_ERROR="1")
    assert 'raise RuntimeError("a defect")' in done.stderr


def test_an_interrupt_is_quiet(tmp_path: Path, distribution: Distribution) -> None:
    os.mkfifo(tmp_path / "fitting")
    waiting = f"""
        import signal
        with open({str(tmp_path / "fitting")!r}, "w") as fifo:
            fifo.write("now")
        signal.pause()
    """
    source = PLUGIN.replace('            raise RuntimeError("a defect")\n', waiting.replace("        ", " " * 12))
    site = distribution(source)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "kvbench", *SMALL_RUN, "quantizer=mine", "quantizer.mood=angry"],
        cwd=tmp_path,
        env={**command_environment(tmp_path), "PYTHONPATH": str(site)},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (tmp_path / "fitting").read_text() == "now"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert err == ""


def test_a_run_leaves_result_and_reports_and_prints_a_table(
    command: Command, distribution: Distribution, tmp_path: Path
) -> None:
    overrides = [*SMALL_RUN, "quantizer=blockgtq", "quantizer.k_bits=2.5", "baselines=[mine]"]
    done = command([*overrides, "hydra.run.dir=out"], distribution(PLUGIN))
    assert (done.returncode, done.stderr) == (0, "")
    assert "blockgtq" in done.stdout
    assert str(tmp_path / "out" / "report.html") in done.stdout
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} == {
        "config.yaml",
        "report.html",
        "report.md",
        "result.json",
        "samples.jsonl",
    }
    result = read_result(tmp_path / "out" / "result.json")
    assert result.quantizer.parameters["k_bits"] == 2.5
    assert result.baselines["mine"].quantizer.distribution == "myplugin-dist"
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["quantizer"]["k_bits"] == 2.5


def test_help_names_commands_choices_and_options(call: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = call("--help")
    assert code == 0
    for word in (
        "kvbench doctor",
        "blockgtq",
        "perplexity",
        "smollm2-135m",
        "wikitext2",
        "k_bits=3.0",
        "recent_window",
    ):
        assert word in out
    assert max(map(len, out.splitlines())) <= 120


def test_help_imports_neither_torch_nor_transformers_nor_pydantic() -> None:
    code = (
        "import sys; from kvbench.cli import main; main(['--help']);"
        "print('imported:', *{'torch', 'transformers', 'pydantic', 'hydra'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == "imported:"


def test_a_plugin_s_quantizer_is_in_help_with_its_origin(command: Command, distribution: Distribution) -> None:
    done = command(["--help"], distribution(PLUGIN))
    assert re.search(r"mine +Keeps everything in fp16, for tests\. \[myplugin-dist 1\.2\]", done.stdout)
    assert "mood=calm" in done.stdout


def test_the_defaults_are_those_of_the_documentation(call: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = call("--cfg", "job")
    config = yaml.safe_load(out)
    assert code == 0
    assert (config["quantizer"]["name"], config["quantizer"]["k_bits"], config["quantizer"]["v_bits"]) == (
        "blockgtq",
        3,
        3,
    )
    assert (config["model"]["name"], config["corpus"]["name"]) == ("smollm2-135m", "pydoc")
    assert list(config["task"]) == ["logit_error", "perplexity"]
    assert config["baselines"] == ["fp16", "tqmse"]


def test_options_of_tasks_and_quantizers_keep_their_types(call: Callable[..., tuple[int, str, str]]) -> None:
    _, out, _ = call("--cfg", "job", "quantizer.k_bits=2", "task=[perplexity]", "task.perplexity.window=64")
    config = yaml.safe_load(out)
    assert isinstance(config["quantizer"]["k_bits"], float)
    assert config["task"] == {"perplexity": {**config["task"]["perplexity"], "window": 64}}


def test_flags_may_stand_between_overrides() -> None:
    assert flags_first(["a=1", "-m", "b=2,3", "--config-dir", "d"]) == ["-m", "--config-dir", "d", "a=1", "b=2,3"]


def test_completion_offers_the_quantizers(command: Command) -> None:
    done = command(["-sc", "query=bash"], COMP_LINE="kvbench quantizer=", COMP_POINT="18")
    assert set(done.stdout.split()) >= {"quantizer=blockgtq", "quantizer=fp16", "quantizer=tqmse"}


def test_version(call: Callable[..., tuple[int, str, str]]) -> None:
    assert call("--version") == (0, f"kvbench {kvbench.__version__}\n", "")


def test_plugins_lists_what_is_there_and_what_is_broken(command: Command, distribution: Distribution) -> None:
    distribution(BROKEN, "clever")
    distribution(BROKEN, "hidden")
    done = command(["plugins"], distribution(PLUGIN), KVBENCH_DISABLE_PLUGINS="hidden,gone")
    assert done.returncode == 0
    assert re.search(
        r"^mine +myplugin-dist +1\.2 +dense +reference +enabled +Keeps everything", done.stdout, re.MULTILINE
    )
    for name, status in (
        ("builtins", "enabled"),
        ("clever", "failed"),
        ("hidden", "disabled"),
        ("myplugin", "enabled"),
    ):
        assert re.search(rf"^{name} +[\w-]+ +[\d.]+ +{status} *$", done.stdout, re.MULTILINE)
    assert "broken: plugin 'clever' (clever-dist 1.2): ModuleNotFoundError" in done.stdout
    assert "disabled: plugin 'hidden'" in done.stdout
    assert "unknown plugin 'gone'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_doctor_reports_versions_devices_and_the_default_model(command: Command, tmp_path: Path) -> None:
    done = command(["doctor", "--json"])
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["kvbench"] == kvbench.__version__
    assert report["packages"]["torch"].startswith("2.")
    assert report["devices"][0].startswith("cpu")
    assert report["attention_baseline"] == ", ".join(available("cuda" if torch.cuda.is_available() else "cpu"))
    assert report["cache_folder"] == str(tmp_path / "cache")
    assert (report["default_model"], report["default_model_there"]) == ("smollm2-135m", False)
    assert any("smollm2-135m is not there yet" in warning for warning in report["warnings"])
