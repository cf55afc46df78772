"""The main job: one quantizer and its baselines on one model, from configuration to result."""

import dataclasses
import shlex
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from kvbench.errors import ResultError
from kvbench.identity import digest, environment, implementation
from kvbench.job import Job, load
from kvbench.measurement import flag_identical, measure, pair_with_baselines
from kvbench.quantizer import Quantizer
from kvbench.results import (
    BlockEnergy,
    Measurement,
    ModelRecord,
    QuantizerRecord,
    Result,
    Status,
    read_result,
    write_result,
)

if TYPE_CHECKING:
    from kvbench.registry import Registry


def run(config: DictConfig, output_dir: Path, registry: "Registry") -> Result:
    """Measure what ``config`` asks for and leave ``result.json`` and ``samples.jsonl`` in ``output_dir``.

    The result is written as it grows, with status ``partial``, so that an interrupted run leaves what it finished;
    repeating the run continues there. A finished run of the same configuration and code in ``output_dir`` is read, not
    repeated. Raises KvbenchError for what the user can mend.
    """
    started = time.perf_counter()
    quantizers = chosen_quantizers(config, registry)
    tasks = [registry.build_task(str(name), node) for name, node in config.task.items()]
    check_writable(output_dir)
    job = load(config, registry, quantizers, tasks)
    result = _blank_result(job, quantizers)
    if (finished := _finished(output_dir, result.run_id)) is not None:
        return finished
    job.samples_file = output_dir / "samples.jsonl"
    job.samples_file.unlink(missing_ok=True)  # an interrupted run's samples are told again as they are recalled

    def keep(status: Status = "partial") -> None:
        result.status, result.duration_s = status, time.perf_counter() - started
        write_result(result, output_dir)

    for _ in measure(job, quantizers[0], result):
        keep()
    status = result.status
    for quantizer in quantizers[1:]:
        baseline = Measurement(status="partial", quantizer=_quantizer_record(quantizer, registry))
        result.baselines[quantizer.name] = baseline
        for _ in measure(job, quantizer, baseline):
            keep()
    flag_identical(result)
    pair_with_baselines(result)
    keep(status)
    return result


def chosen_quantizers(config: DictConfig, registry: "Registry") -> list[Quantizer]:
    """The quantizer asked for, then the baselines, which take its ``k_bits`` and ``v_bits`` where they have them."""
    main = registry.build_quantizer(config.quantizer)
    chosen = [main]
    for name in config.baselines:
        entry = registry.quantizer(str(name))
        options = {option.name for option in dataclasses.fields(entry.value)}
        shared: dict[str, Any] = {
            bits: getattr(main, bits) for bits in ("k_bits", "v_bits") if bits in options and hasattr(main, bits)
        }
        if name not in [quantizer.name for quantizer in chosen]:
            chosen.append(registry.build_quantizer({"name": name, **shared}))
    return chosen


def check_writable(directory: Path) -> None:
    """Raise ResultError now, not after an hour, where results cannot be written to ``directory``."""
    probe = directory / ".kvbench-probe"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ResultError(
            f"cannot write to {directory}: {error.strerror or error}. Choose another folder with hydra.run.dir=DIR."
        ) from error


def _quantizer_record(quantizer: Quantizer, registry: "Registry") -> QuantizerRecord:
    entry = registry.quantizer(quantizer.name)
    return QuantizerRecord(
        name=quantizer.name,
        distribution=entry.distribution,
        version=entry.version,
        parameters=dataclasses.asdict(quantizer),
    )


def _blank_result(job: Job, quantizers: list[Quantizer]) -> Result:
    parts = {
        "quantizers": [implementation(quantizer) for quantizer in quantizers],
        "tasks": [implementation(task) for task in job.tasks],
    }
    geometry = job.loaded.geometry
    return Result(
        status="partial",
        run_id=digest({**job.identity(), **parts}),
        created=datetime.now(UTC),
        command=_command(),
        quantizer=_quantizer_record(quantizers[0], job.registry),
        model=ModelRecord(
            name=job.loaded.name,
            source=job.loaded.source,
            revision=job.loaded.revision,
            fingerprint=job.loaded.fingerprint,
            dtype=geometry.dtype,
            geometry={"layers": [dataclasses.asdict(layer) for layer in geometry.layers]},
        ),
        corpus={"name": job.corpus.name, **job.corpus.digests},
        calibration=dict(job.calibration.source) if job.calibration else {},
        block_energy=_block_energy(job),
        config=_resolved(job.config),
        environment=environment(job.loaded.model.device),
    )


def _block_energy(job: Job) -> BlockEnergy | None:
    """What mixed bit widths are made from, in as few numbers as a picture needs: means over KV heads, four digits."""
    if job.calibration is None:
        return None
    layers = list(zip(job.calibration.layers, job.loaded.geometry.layers, strict=True))

    def rounded(energy: Any) -> list[float]:
        return [float(f"{value:.4g}") for value in energy.mean(axis=0)]

    return BlockEnergy(
        q=[rounded(layer.q.block_energy(shape)) for layer, shape in layers],
        k=[rounded(layer.k.block_energy(shape)) for layer, shape in layers],
    )


def _resolved(config: DictConfig) -> dict[str, Any]:
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}


def _command() -> str:
    """The command line that repeats this run."""
    overrides = list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
    return shlex.join(["kvbench", *overrides])


def _finished(directory: Path, run_id: str) -> Result | None:
    """The result of the same run in ``directory`` if there is one with nothing left to measure, baselines included."""
    try:
        found = read_result(directory / "result.json")
    except ResultError:
        return None
    statuses = {found.status, *(baseline.status for baseline in found.baselines.values())}
    return found if found.run_id == run_id and statuses == {"ok"} else None
