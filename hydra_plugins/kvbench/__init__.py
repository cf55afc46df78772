"""The sweeper and launcher of ``kvbench -m``, where Hydra accepts them: in its plugin namespace, and nowhere else.

What they do is in ``kvbench.sweep``. Hydra imports this module in every application of the same environment.
"""

from kvbench import sweep


class CellSweeper(sweep.CellSweeper):
    """``hydra/sweeper=kvbench``."""


class CellLauncher(sweep.CellLauncher):
    """``hydra/launcher=kvbench``."""
