"""Measuring one quantizer: fit it to the model, run every task on it, keep what was measured with its proof."""

import json
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvbench.errors import KvbenchError, NonFiniteError, PluginError
from kvbench.identity import digest, implementation
from kvbench.job import Job
from kvbench.kernels.formats import CacheFormat, RotatedCodebook
from kvbench.measurement_store import StoredTask, recall, remember
from kvbench.models import LoadedModel
from kvbench.peer_session import PeerSession
from kvbench.peers import PeerQuantizer
from kvbench.plugin_codec import probe
from kvbench.progress import announce
from kvbench.quantizer import Quantizer
from kvbench.results import CacheRecord, LayerEngagement, Measurement, PairedDifference, Result, TaskRecord
from kvbench.sample_store import SampleStore, samples_path
from kvbench.session import Session, added
from kvbench.statistics import paired_difference
from kvbench.task import Task

UNMEASURED = frozenset({"seconds"})  # metrics that differ between runs of the same thing


def fit(job: Job, quantizer: Quantizer) -> CacheFormat:
    """The quantizer's format, checked against the model and, where it is a plugin's own, tried on a few numbers.

    Raises PluginError where it does not fit or does not work.
    """
    format = _fitted(job, quantizer)
    layers = job.loaded.geometry.layers
    if not isinstance(format, CacheFormat):
        raise PluginError(
            f"quantizer '{quantizer.name}' must return a CacheFormat from fit(), not {type(format).__name__}."
        )
    if format.layers != len(layers):
        raise PluginError(
            f"quantizer '{quantizer.name}' gave formats for {format.layers} layers; the model has {len(layers)}."
        )
    for index, shape in enumerate(layers):
        for role, tensor in (("key", format.key[index]), ("value", format.value[index])):
            if (tensor.kv_heads, tensor.head_dim) != (shape.kv_heads, shape.head_dim):
                raise PluginError(
                    f"quantizer '{quantizer.name}', layer {index}: its {role} format has {tensor.kv_heads} KV heads of "
                    f"{tensor.head_dim} dims, the model {shape.kv_heads} of {shape.head_dim}."
                )
            with _named(quantizer):
                probe(tensor, index, f"{role}s")
    return format


def _fitted(job: Job, quantizer: Quantizer) -> CacheFormat:
    """What ``fit`` returns. A plugin's error there is the plugin's, told in a line; kvbench's own is a defect."""
    try:
        return quantizer.fit(job.calibration if quantizer.needs_calibration else None, job.loaded.geometry)
    except (KvbenchError, MemoryError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        if type(quantizer).__module__.startswith("kvbench."):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")
        raise PluginError(
            f"quantizer '{quantizer.name}' ({type(quantizer).__module__}) failed in fit(): {reason}.\n"
            "HYDRA_FULL_ERROR=1 shows where."
        ) from error


@contextmanager
def _named(quantizer: Quantizer) -> Iterator[None]:
    """Say whose format it was that failed."""
    try:
        yield
    except PluginError as error:
        raise PluginError(f"quantizer '{quantizer.name}', {error}") from error


def measure(job: Job, quantizer: Quantizer, measurement: Measurement) -> Iterator[None]:
    """Fill ``measurement`` task by task; yields after each, so that the caller can keep what there is."""
    announce(f"fitting {quantizer.name}")
    format = fit(job, quantizer)
    format_digest = measurement.quantizer.format_digest = format.digest()
    measurement.quantizer.allocation = allocation(format, job.loaded)
    engagement: list[LayerEngagement] = []
    for task in job.tasks:
        announce(f"measuring {task.name} of {quantizer.name}")
        stored = _measure_task(job, quantizer, format, format_digest, task)
        measurement.tasks[task.name] = stored.task
        engagement = added(engagement, stored.engagement)
        measurement.cache = CacheRecord(
            prefill="exact" if isinstance(quantizer, PeerQuantizer) else job.cache.prefill,
            n_sink=job.cache.n_sink,
            recent_window=job.cache.recent_window,
            excluded_layers=sorted(job.cache.excluded_layers),
            backend=ran(engagement) or job.backend,
            engagement=engagement,
        )
        largest = measurement.compression
        if stored.compression and (largest is None or stored.compression.tokens > largest.tokens):
            measurement.compression = stored.compression
        yield
    statuses = {record.status for record in measurement.tasks.values()}
    measurement.status = "failed" if "failed" in statuses else "oom" if "oom" in statuses else "ok"


def ran(engagement: Sequence[LayerEngagement]) -> str:
    """The backends that read the layers, the most frequent first."""
    return " and ".join(name for name, _ in Counter(layer.backend for layer in engagement).most_common())


def _measure_task(job: Job, quantizer: Quantizer, format: CacheFormat, format_digest: str, task: Task) -> StoredTask:
    """One task, from the store where the same thing was measured before. Out of memory and bugs are results."""
    parts = {"quantizer": implementation(quantizer), "format": format_digest, "task": implementation(task)}
    key = digest({**job.identity(), **parts})
    samples = SampleStore(samples_path(key), job.samples_file, {"quantizer": quantizer.name, "task": task.name})
    if (stored := recall(key)) is not None:
        samples.recount()
        return stored
    kind = PeerSession if isinstance(quantizer, PeerQuantizer) else Session
    session = kind(job.loaded, quantizer, format, job.corpus, job.cache, job.backend, job.memo, samples=samples)
    started = time.perf_counter()
    try:
        with _named(quantizer):
            done = task.run(session)
        check_metrics(task.name, quantizer.name, done.metrics)
    except KvbenchError:
        raise
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        record = TaskRecord(status="oom", error=str(error).splitlines()[0] if str(error) else "out of memory")
        return StoredTask(task=record, engagement=session.engagement, compression=session.compression)
    except Exception as error:
        record = TaskRecord(status="failed", error="".join(traceback.format_exception(error)))
        return StoredTask(task=record, engagement=session.engagement, compression=session.compression)
    record = TaskRecord(
        status="ok",
        path=done.path,
        metrics=done.metrics,
        n=done.n,
        unit=done.unit,
        notes=list(done.notes),
        samples=done.samples,
        duration_s=time.perf_counter() - started,
        prefill_peak_bytes=session.prefill_peak_bytes,
    )
    stored = StoredTask(task=record, engagement=session.engagement, compression=session.compression)
    remember(key, stored)
    return stored


def check_metrics(task: str, quantizer: str, metrics: Mapping[str, Any]) -> None:
    """Raise NonFiniteError for NaN or infinity among a task's metrics, PluginError where they are not JSON data."""
    for key, value in metrics.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise NonFiniteError(f"task '{task}' on quantizer '{quantizer}': {key} has NaN or infinity.") from error
        except TypeError as error:
            raise PluginError(f"task '{task}' must return plain JSON data as metrics; {key}: {error}.") from error


def allocation(format: CacheFormat, loaded: LoadedModel) -> list[list[list[int]]] | None:
    """Key code width per layer, KV head and RoPE block, where keys are in rotated groups of whole blocks."""
    layers = []
    for tensor, shape in zip(format.key, loaded.geometry.layers, strict=True):
        if not isinstance(tensor, RotatedCodebook):
            return None
        first_dims = [first for first, _ in shape.blocks]
        widths = [head.widths() for head in tensor.heads]
        layers.append([[head[dim] for dim in first_dims] for head in widths])
    return layers


def flag_identical(result: Result) -> None:
    """Note where two quantizers with different formats measured exactly the same numbers: something did not engage."""
    measurements = list(result.measurements().items())
    for position, (_, one) in enumerate(measurements):
        for other_name, other in measurements[:position]:
            if one.quantizer.format_digest == other.quantizer.format_digest:
                continue
            for task in one.tasks.keys() & other.tasks.keys():
                first, second = (_comparable(each.tasks[task].metrics) for each in (one, other))
                if first and first == second:
                    one.tasks[task].notes.append(
                        f"identical to {other_name}: two formats that must differ gave the same numbers to the last bit"
                    )


def pair_with_baselines(result: Result) -> None:
    """Fill ``paired`` of the quantizer's tasks: its samples minus each baseline's, where both have the same ones."""
    for name, record in result.tasks.items():
        for baseline, measurement in result.baselines.items():
            other = measurement.tasks.get(name)
            if other is None or record.status != "ok" or other.status != "ok":
                continue
            differences = {
                metric: PairedDifference(**paired_difference(values, other.samples[metric])._asdict(), n=len(values))
                for metric, values in record.samples.items()
                if len(other.samples.get(metric, ())) == len(values)
            }
            if differences:
                record.paired[baseline] = differences


def _comparable(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in metrics.items() if key not in UNMEASURED}
