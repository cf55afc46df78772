"""Where kvbench keeps what it fetched or computed: converted models and calibrations."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$KVBENCH_CACHE``, else ``$XDG_CACHE_HOME/kvbench``, else ``~/.cache/kvbench``. The folder may not exist yet."""
    if own := os.environ.get("KVBENCH_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache")).expanduser() / "kvbench"
