"""GGUF files as transformers models: converted once into safetensors in the cache folder, loaded from there after.

A converted folder is complete when it holds ``converted.json``, which is written last, inside a temporary folder that
is renamed into place: a kill at any moment leaves nothing that could be mistaken for a model.
"""

import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.errors import ModelError
from kvbench.fingerprint import fingerprint
from kvbench.progress import announce

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

MANIFEST = "converted.json"
WEIGHTS = ".safetensors"


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_converted(
    target: Path, obtain: Callable[[Path], Path]
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase", str]:
    """Model, tokenizer and fingerprint from ``target``, converting first where it is missing or damaged.

    ``obtain(scratch)`` is called only then; it returns the GGUF file's path, possibly inside ``scratch``.
    """
    from filelock import FileLock

    if (loaded := _load_intact(target)) is not None:
        return loaded
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(target.with_name(f".{target.name}.lock")):
            if (loaded := _load_intact(target)) is None:  # another process may have converted meanwhile
                _convert(target, obtain)
                loaded = _load_intact(target)
    except OSError as error:
        raise ModelError(
            f"cannot keep the converted model in {target}: {error.strerror or error}.\n"
            "Free some space there, or choose another folder with KVBENCH_CACHE=DIR."
        ) from error
    if loaded is None:
        raise ModelError(
            f"the model converted into {target} does not read back.\nCheck the disk, then remove that folder."
        )
    return loaded


def is_converted(target: Path) -> bool:
    """Whether ``target`` holds a converted model, judged by file sizes and the small files' hashes."""
    try:
        manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest["files"].items():
            path = target / name
            if path.stat().st_size != entry["size"]:
                return False
            if path.suffix != WEIGHTS and sha256_of(path) != entry["sha256"]:
                return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return True


def _load_intact(target: Path) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase", str] | None:
    """What ``target`` holds, or None where it is missing or damaged. The weights are checked by their fingerprint."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not is_converted(target):
        return None
    try:
        model = AutoModelForCausalLM.from_pretrained(target)
        tokenizer = AutoTokenizer.from_pretrained(target)
    except (OSError, ValueError, RuntimeError, SafetensorError):
        return None
    found = fingerprint(model)
    manifest = json.loads((target / MANIFEST).read_text(encoding="utf-8"))
    return (model, tokenizer, found) if found == manifest["fingerprint"] else None


def _convert(target: Path, obtain: Callable[[Path], Path]) -> None:
    for leftover in target.parent.glob(f".{target.name}.tmp-*"):  # of a conversion that was killed; we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.tmp-"))
    try:
        folder = scratch / "model"
        _save_as_safetensors(obtain(scratch), folder)
        if target.exists():
            target.rename(scratch / "damaged")
        folder.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _save_as_safetensors(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    announce(f"converting {gguf.name}, once")
    try:
        with _without_bars():
            model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except Exception as error:  # the readers of a malformed file raise anything, bare Exception among it
        raise ModelError(f"{gguf} cannot be loaded as a GGUF model: {_first_line(error)}") from error
    # Weights are plain floating point now; without this the copy would be taken for a quantized one.
    del model.config.quantization_config
    model.hf_quantizer = None  # type: ignore[assignment]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    files = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(folder.iterdir())}
    # The name a GGUF carries is not in the copy's identity, but dtype and defaults are: fingerprint what reads back.
    identity = fingerprint(AutoModelForCausalLM.from_pretrained(folder))
    (folder / MANIFEST).write_text(json.dumps({"fingerprint": identity, "files": files}, indent=1), encoding="utf-8")


@contextmanager
def _without_bars() -> Iterator[None]:
    """Silence the dequantizer's progress bar in a pipe: it is one that transformers' own switch does not reach."""
    with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
        yield


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
