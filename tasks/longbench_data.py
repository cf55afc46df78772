"""LongBench's English datasets: their samples from a folder or the hub, and the prompts they are put in.

The wording of the prompts is read from the installed lm-eval, which carries LongBench's task definitions.
"""

import functools
import hashlib
import importlib.util
import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.errors import ConfigurationError, CorpusError
from kvbench.hub import HubUnavailable, resolve_revision

HUB_DATASET, HUB_ARCHIVE = "THUDM/LongBench", "data.zip"
# Datasets that are put to a chat model without its chat template, as upstream does (LongBench's pred.py).
WITHOUT_CHAT = frozenset({"trec", "triviaqa", "samsum", "lcc", "repobench-p"})
# Where lm-eval 0.4.13 words a prompt other than LongBench's dataset2prompt.json: what to replace, and by what.
LM_EVAL_DIFFERS = {
    "triviaqa": ("{{context}}\n{{question}}", "{{context}}\n\n{{question}}"),
    "samsum": ("{{context}}\n{{question}}", "{{context}}\n\n{{question}}"),
    "passage_count": ("The final answer is:", "The final answer is: "),
    "passage_retrieval_en": ("The answer is:", "The answer is: "),
    "lcc": ("Next line of code:", "Next line of code:\n"),
    "repobench-p": ("Next line of code:", "Next line of code:\n"),
}


@dataclass(frozen=True)
class Template:
    """How a dataset's samples become prompts, and the longest answer in tokens."""

    text: str
    max_new_tokens: int

    def fill(self, sample: dict[str, Any]) -> str:
        fields = {"context": sample["context"], "question": sample["input"]}
        return re.sub(r"\{\{(context|question)\}\}", lambda match: str(fields[match.group(1)]), self.text)


@functools.cache
def template(dataset: str) -> Template:
    """The prompt of ``dataset``. Raises ConfigurationError without lm-eval, or with one that has no such task."""
    import yaml

    found = importlib.util.find_spec("lm_eval")
    if found is None or not found.submodule_search_locations:
        raise ConfigurationError(
            "task=longbench takes its prompts from lm-eval, which is not installed: pip install 'kvbench[longbench]'."
        )

    class Loader(yaml.SafeLoader):
        """Plain data; lm-eval's references to its own functions are left out."""

    Loader.add_multi_constructor("!", lambda loader, suffix, node: None)
    path = Path(found.submodule_search_locations[0]) / "tasks" / "longbench" / f"{dataset}.yaml"
    try:
        task = yaml.load(path.read_text(encoding="utf-8"), Loader)
        text, length = task["doc_to_text"].rstrip(), int(task["generation_kwargs"]["max_gen_toks"])
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"the installed lm-eval has no usable LongBench task '{dataset}' ({type(error).__name__}): "
            "pip install lm-eval==0.4.13."
        ) from error
    theirs, ours = LM_EVAL_DIFFERS.get(dataset, ("", ""))
    return Template(text if ours in text and ours else text.replace(theirs, ours), length)


def read_samples(dataset: str, data_dir: str | None, limit: int | None) -> list[dict[str, Any]]:
    """The first ``limit`` samples of ``dataset`` (all without it), from ``data_dir/<dataset>.jsonl`` or the hub.

    Raises CorpusError where they are not there or not in upstream's layout.
    """
    if data_dir is None:
        with zipfile.ZipFile(_archive()) as archive, archive.open(f"data/{dataset}.jsonl") as file:
            return _parse(dataset, file, limit)
    path = samples_file(dataset, data_dir)
    try:
        with path.open("rb") as file:
            return _parse(str(path), file, limit)
    except OSError as error:
        raise CorpusError(
            f"{path} cannot be read: {error.strerror or error}. task.longbench.data_dir must hold upstream's files, "
            f"or leave '{dataset}' out of task.longbench.datasets."
        ) from error


def samples_file(dataset: str, data_dir: str) -> Path:
    return Path(data_dir).expanduser() / f"{dataset}.jsonl"


def samples_digest(datasets: Iterable[str], data_dir: str | None) -> str:
    """SHA-256 over the samples' files; a file that is not there is left to :func:`read_samples` to complain of."""
    total = hashlib.sha256()
    for path in [_archive()] if data_dir is None else [samples_file(dataset, data_dir) for dataset in datasets]:
        total.update(f"{path.name}\0".encode() + (path.read_bytes() if path.is_file() else b""))
    return total.hexdigest()


def _parse(origin: str, lines: Iterable[bytes], limit: int | None) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if limit is not None and len(samples) >= limit:
            break
        try:
            sample = json.loads(line)
            needed = {key: sample[key] for key in ("input", "context", "answers")}
            samples.append({**needed, "all_classes": sample.get("all_classes")})
        except (ValueError, KeyError, TypeError) as error:
            raise CorpusError(
                f"{origin}, line {number}, is not a LongBench sample ({type(error).__name__}: {error}). "
                "Each line must be JSON with input, context and answers."
            ) from error
    return samples


@functools.cache
def _archive() -> Path:
    """Upstream's archive of all datasets, from the hub or its cache."""
    from huggingface_hub import hf_hub_download

    way_out = "Download and unpack data.zip, then set task.longbench.data_dir=DIR."
    revision, offline = None, ""
    try:
        revision = resolve_revision(HUB_DATASET, None, "dataset")
    except HubUnavailable as error:  # what was downloaded before still serves
        offline = str(error)
    try:
        return Path(
            hf_hub_download(
                HUB_DATASET, HUB_ARCHIVE, repo_type="dataset", revision=revision, local_files_only=bool(offline)
            )
        )
    except Exception as error:  # the hub's client lets errors of many libraries through
        reason = offline or type(error).__name__
        raise CorpusError(f"cannot load LongBench from {HUB_DATASET}: {reason}.\n{way_out}") from error
