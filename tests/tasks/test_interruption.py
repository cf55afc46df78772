"""A task that was killed and is run again measures only what is missing, and ends with the same numbers and proof."""

from pathlib import Path
from typing import Any

import pytest

from kvbench.quantizers.tqmse import TQMSE
from kvbench.sample_store import SampleStore
from kvbench.task import Task
from kvbench.tasks.agreement import Agreement
from kvbench.tasks.fidelity import Fidelity
from kvbench.tasks.logit_error import WINDOWS_AT_ONCE, LogitError
from kvbench.tasks.perplexity import Perplexity

from .sessions import session

TASKS: list[Task] = [
    LogitError(tokens=3 * WINDOWS_AT_ONCE * 16, window=16),
    Perplexity(windows=3, window=40),
    Fidelity(windows=3, window=40),
    Agreement(prompts=6, prompt_tokens=16, new_tokens=4, batch_size=2),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_killed_task_continues_after_its_last_sample(task: Task, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    results: list[Any] = []
    for finished in (0, 2):  # without an interruption, and killed in the third sample
        kept.write_text("".join(kept.read_text().splitlines(keepends=True)[:finished]) if finished else "")
        work = session(TQMSE(k_bits=2, v_bits=2))
        work.samples = SampleStore(kept)
        found = task.run(work)
        results.append(({**found.metrics, "seconds": 0}, found.samples, found.n, work.engagement, work.compression))
    assert results[0] == results[1]
    assert len(kept.read_text().splitlines()) == 3
