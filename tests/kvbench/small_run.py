"""The smallest run there is, and the environment it runs in."""

import os
from pathlib import Path

# One tiny random model and little text: a run takes as long as its imports.
SMALL_RUN = (
    "model=random",
    "calibration.tokens=128",
    "calibration.window=64",
    "task=[perplexity]",
    "task.perplexity.windows=1",
    "task.perplexity.window=64",
    "baselines=[]",
    "threads=1",
)


def command_environment(folder: Path) -> dict[str, str]:
    """The environment of a user without settings of their own."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("KVBENCH_", "HYDRA_", "PYTHONPATH"))}
    return {**kept, "KVBENCH_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
