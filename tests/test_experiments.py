"""Every shipped experiment composes, from the command line's own configuration, to what it says it is."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

import kvbench.conf
from kvbench.application import check_choices, store_configuration
from kvbench.peers import PeerQuantizer
from kvbench.registry import load_registry
from kvbench.sweep import register_sweep_plugins
from kvbench.tasks.longbench import LongBench
from kvbench.tasks.niah import Niah

EXPERIMENTS = sorted(file.stem for file in (Path(next(iter(kvbench.conf.__path__))) / "experiment").glob("*.yaml"))


def composed(*overrides: str) -> DictConfig:
    store_configuration(load_registry())
    register_sweep_plugins()
    with initialize_config_module("kvbench.conf", version_base="1.3"):
        return compose("config", list(overrides))


def swept(name: str) -> dict[str, str]:
    """What an experiment sweeps over, as its file says it."""
    (folder,) = kvbench.conf.__path__
    params = OmegaConf.load(Path(folder, "experiment", f"{name}.yaml")).hydra.sweeper.params
    return {str(key): str(value) for key, value in OmegaConf.to_container(params, resolve=False).items()}


def built(config: DictConfig, name: str) -> Any:
    return load_registry().build_task(name, config.task[name])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_to_choices_that_exist(name: str) -> None:
    check_choices(composed(f"experiment={name}"), load_registry())


def test_without_an_experiment_the_defaults_stay() -> None:
    assert composed().model.name == "smollm2-135m"


def test_one_task_needs_no_brackets() -> None:
    config = composed("quantizer=blockgtq", "model=smollm2-135m", "task=niah", "task.niah.preset=small")
    assert list(config.task) == ["niah"]
    check_choices(config, load_registry())
    assert built(config, "niah") == Niah(preset="small")


def test_the_command_line_wins_over_an_experiment() -> None:
    config = composed("experiment=paper_niah", "model=qwen2.5-3b-instruct", "quantizer.k_bits=3")
    assert (config.model.name, config.quantizer.k_bits, config.quantizer.v_bits) == ("qwen2.5-3b-instruct", 3, 2)


def test_the_papers_needles_are_six_tasks_at_six_lengths_and_eleven_depths() -> None:
    config = composed("experiment=paper_niah")
    niah = built(config, "niah")
    assert isinstance(niah, Niah)
    assert (len(niah.tasks), len(niah.grid.lengths), len(niah.grid.depths), niah.grid.trials) == (6, 6, 11, 3)
    assert max(niah.grid.lengths) + niah.max_new_tokens <= config.model.architecture.max_position_embeddings
    assert (config.model.name, config.quantizer.k_bits, config.quantizer.v_bits) == ("llama3.1-8b", 2, 2)


def test_the_papers_longbench_is_eight_datasets_of_whole_size() -> None:
    longbench = built(composed("experiment=paper_longbench"), "longbench")
    assert isinstance(longbench, LongBench)
    assert (len(longbench.datasets), longbench.limit, longbench.max_input) == (8, None, 31500)


def test_the_papers_logit_error_is_on_wikitext_in_windows_of_256_tokens() -> None:
    config = composed("experiment=paper_logit_error")
    assert config.corpus.name == "wikitext2"
    assert (config.task.logit_error.tokens, config.task.logit_error.window, config.calibration.window) == (
        2048,
        256,
        256,
    )
    assert list(config.task) == ["logit_error"]


def test_the_comparators_are_all_built_in_quantizers_with_keys_and_values_alike() -> None:
    params = swept("comparators")
    quantizers = load_registry({}).quantizers.items()
    own = {name for name, entry in quantizers if not issubclass(entry.value, PeerQuantizer)}
    assert set(params["quantizer"].split(",")) == own
    assert params["quantizer.k_bits"] == "2,4"
    assert params["quantizer.v_bits"] == "${quantizer.k_bits}"


def test_the_comparators_read_the_same_text_in_every_sweep() -> None:
    names = ("comparators", "comparators_windows", "comparators_decode")
    sweep, windows, decode = (composed(f"experiment={name}").task.perplexity for name in names)
    assert sweep == windows
    assert sweep.window == decode.window


def test_the_peers_stand_beside_methods_whose_chunks_read_themselves_exactly_too() -> None:
    config = composed("experiment=comparators_peers")
    assert (config.cache.prefill, config.task.perplexity.window % config.cache.prefill_chunk) == ("exact", 0)
    quantizers = load_registry({}).quantizers.items()
    peers = {name for name, entry in quantizers if issubclass(entry.value, PeerQuantizer)}
    assert peers < set(swept("comparators_peers")["quantizer"].split(","))
