"""The comparison as data for notebooks: one row a quantizer, one column a number, as CSV or Parquet."""

import csv
import io
from pathlib import Path
from typing import Any

from kvbench.errors import ResultError
from kvbench.reports.comparison import Comparison, Row
from kvbench.reports.scores import finite

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")  # a spreadsheet would run a text that begins so

Record = dict[str, str | float | int | bool | None]


def records(comparison: Comparison) -> list[Record]:
    """One flat record a row. Every scalar metric of every task is ``<task>.<metric>``; what is absent is None.

    Paired differences are ``<task>.<metric> - <baseline>``, with ``.low`` and ``.high`` for their interval. All records
    have the same keys.
    """
    told = [_record(comparison, row) for row in comparison.rows]
    columns = dict.fromkeys(column for record in told for column in record)
    return [{column: record.get(column) for column in columns} for record in told]


def _record(comparison: Comparison, row: Row) -> Record:
    result, measurement = row.run.result, row.measurement
    size, cache = measurement.compression, measurement.cache
    record: Record = {
        "label": row.label,
        "quantizer": row.name,
        "role": "baseline" if row.is_baseline else "run",
        "status": measurement.status,
        "model": result.model.name,
        "model_fingerprint": result.model.fingerprint,
        "dtype": result.model.dtype,
        "corpus": result.corpus.get("name"),
        "distribution": measurement.quantizer.distribution,
        "version": measurement.quantizer.version,
    }
    for name, value in measurement.quantizer.parameters.items():
        record[f"parameter.{name}"] = value if isinstance(value, str | bool | int | float | None) else str(value)
    if size is not None:
        record |= {f"compression.{name}": value for name, value in size.model_dump().items()}
        record["compression.effective_bits"] = row.effective_bits
    if cache is not None:
        record |= {
            "cache.prefill": cache.prefill,
            "cache.n_sink": cache.n_sink,
            "cache.recent_window": cache.recent_window,
            "cache.backend": cache.backend,
            "cache.packed_layers": sum(layer.packed_tokens_read > 0 for layer in cache.engagement),
        }
    for task, entry in measurement.tasks.items():
        record |= {f"{task}.status": entry.status, f"{task}.path": entry.path, f"{task}.n": entry.n}
        record |= {f"{task}.{key}": finite(value) for key, value in entry.metrics.items() if finite(value) is not None}
        for baseline, differences in entry.paired.items():
            for metric, difference in differences.items():
                name = f"{task}.{metric} - {baseline}"
                record |= {name: difference.mean, f"{name}.low": difference.low, f"{name}.high": difference.high}
    return record | {
        "device": result.environment.device,
        "kvbench": result.environment.kvbench,
        "torch": result.environment.packages.get("torch"),
        "created": result.created.isoformat(),
        "run_id": result.run_id,
        "file": str(row.run.path),
        "command": result.command,
    }


def render_csv(comparison: Comparison) -> str:
    """RFC 4180 with a heading. A text that a spreadsheet would take for a formula has an apostrophe before it."""
    told = records(comparison)
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow([_inert(column) for column in told[0]])
    writer.writerows([[_inert(value) for value in record.values()] for record in told])
    return text.getvalue()


def _inert(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else value


def write_parquet(comparison: Comparison, path: Path) -> None:
    """Writes one Parquet file; texts are as they are. Raises ResultError without pyarrow, or where it cannot write."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ResultError(
            "Parquet needs pyarrow, which is not installed.\nInstall it by pip install 'kvbench[report]', or give "
            "--format csv."
        ) from error
    told = records(comparison)
    columns = {column: _column([record[column] for record in told]) for column in told[0]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    except OSError as error:
        raise ResultError(f"cannot write {path}: {error.strerror or error}. Choose another --out.") from error


def _column(values: list[Any]) -> list[Any]:
    """Values of one type: numbers as floats where any is one, else texts where they differ in type."""
    kinds = {type(value) for value in values if value is not None}
    if len(kinds) <= 1:
        return [_encodable(value) for value in values]
    if kinds <= {int, float}:
        return [None if value is None else float(value) for value in values]
    return [None if value is None else _encodable(str(value)) for value in values]


def _encodable(value: Any) -> Any:
    """Lone surrogates, which JSON may hold, have no UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
