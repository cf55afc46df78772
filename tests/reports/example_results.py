"""Results as a real run makes them, built through the schema: SmolLM2-135M's geometry, plausible numbers."""

from datetime import UTC, datetime
from typing import Any

from kvbench.results import (
    CacheRecord,
    Compression,
    Environment,
    LayerEngagement,
    Measurement,
    ModelRecord,
    QuantizerRecord,
    Result,
    TaskRecord,
)

LAYERS, KV_HEADS, BLOCKS, HEAD_DIM, TOKENS = 30, 3, 32, 64, 4096
BYTES_FP16 = TOKENS * LAYERS * KV_HEADS * HEAD_DIM * 2 * 2

HOSTILE_NAMES = {
    "html": '<img src=x onerror="alert(1)"></table></svg><script>alert(2)</script>',
    "quotes": "it's \"quoted\" & 'odd' `code` | pipe \\ back",
    "emoji": "quant 👩‍🔬🚀",
    "right-to-left": "مُكمِّم \u202egnp.exe\u202c עברית",
    "long": "long-" * 60,
    "markdown": "**bold** [link](https://evil.example/) ![x](y) # h ~~s~~ | a\n\n# heading",
    "terminal": "\x1b[31mred\x1b[0m\x07 [bold]markup[/bold]",
}


def compression(code_bits_k: float, code_bits_v: float, norms: float = 0.5, padding: float = 0.125) -> Compression:
    """``norms`` and ``padding`` in bits an element."""
    elements = BYTES_FP16 // 2
    mean = (code_bits_k + code_bits_v) / 2
    allocated = round(elements * (mean + norms + padding) / 8)
    return Compression(
        code_bits_k=code_bits_k,
        code_bits_v=code_bits_v,
        effective_bits_k=code_bits_k + norms + padding,
        effective_bits_v=code_bits_v + norms + padding,
        bytes_allocated=allocated,
        bytes_analytical=elements * (mean + norms) / 8,
        bytes_fp16=BYTES_FP16,
        ratio=BYTES_FP16 / allocated,
        tokens=TOKENS,
    )


def engagement(key_format: str, packed: bool) -> list[LayerEngagement]:
    return [
        LayerEngagement(
            layer=layer,
            key_format=key_format,
            value_format="rotated_codebook 3 bits" if packed else "dense float16",
            packed_tokens_read=TOKENS if packed else 0,
            backend="reference",
        )
        for layer in range(LAYERS)
    ]


def allocation() -> list[list[list[int]]]:
    """Widths that fall from slow to fast blocks, each layer and head a little different, 3 bits on average."""
    layers = []
    for layer in range(LAYERS):
        heads = []
        for head in range(KV_HEADS):
            widths = [1 + (block * 4 + layer + 5 * head) // (BLOCKS + 2) for block in range(BLOCKS)]
            widths[-1] = min(8, widths[-1] + layer % 4)
            heads.append(widths)
        layers.append(heads)
    return layers


def logit_error(mean: float) -> TaskRecord:
    shape = [1 + 0.35 * ((layer * 7) % 11 - 5) / 5 + (0.8 if layer == 1 else 0.0) for layer in range(LAYERS)]
    scale = mean / (sum(shape) / LAYERS)
    return TaskRecord(
        status="ok",
        path="simulated",
        metrics={"per_layer": [scale * value for value in shape], "mean": mean},
        n=2048,
        unit="tokens",
        duration_s=4.2,
    )


def perplexity(value: float) -> TaskRecord:
    metrics = {"perplexity": value, "nll": 3.2, "tokens": 4096, "windows": 8, "stride": 512, "seconds": 18.0}
    return TaskRecord(status="ok", path="simulated", metrics=metrics, n=8, unit="windows", duration_s=18.0)


def measurement(name: str, code_bits: float, logit: float, ppl: float, **changes: Any) -> Measurement:
    packed = name != "fp16"
    return Measurement(
        **{
            "status": "ok",
            "quantizer": QuantizerRecord(
                name=name,
                distribution="kvbench",
                version="0.1.0",
                parameters={"k_bits": code_bits, "v_bits": code_bits} if packed else {},
                format_digest="f" * 64,
                allocation=allocation() if name == "blockgtq" else None,
            ),
            "cache": CacheRecord(
                prefill="quantized",
                n_sink=0,
                recent_window=0,
                excluded_layers=[],
                backend="reference",
                engagement=engagement("rotated_codebook 3 bits" if packed else "dense float16", packed),
            ),
            "compression": compression(code_bits, code_bits) if packed else compression(16, 16, norms=0, padding=0),
            "tasks": {"logit_error": logit_error(logit), "perplexity": perplexity(ppl)},
            **changes,
        }
    )


def result(**changes: Any) -> Result:
    """``kvbench quantizer=blockgtq`` with the default baselines; ``changes`` replace fields of the result."""
    asked = measurement("blockgtq", 3, 2.406, 27.43)
    fields: dict[str, Any] = {
        **{name: getattr(asked, name) for name in Measurement.model_fields},
        "run_id": "3f9c0d4e5a6b7c88",
        "created": datetime(2025, 11, 3, 14, 5, 9, tzinfo=UTC),
        "command": "kvbench quantizer=blockgtq model=smollm2-135m quantizer.k_bits=3 quantizer.v_bits=3",
        "duration_s": 71.4,
        "model": ModelRecord(
            name="smollm2-135m",
            source="wheel",
            revision="0.1.2",
            fingerprint="0a" * 32,
            dtype="float32",
            geometry={
                "layers": [
                    {"q_heads": 9, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "rotary_dim": HEAD_DIM}
                    for _ in range(LAYERS)
                ]
            },
        ),
        "corpus": {"name": "pydoc", "calibration_sha256": "1b" * 32, "evaluation_sha256": "2c" * 32},
        "calibration": {"tokens": 2048, "window": 256},
        "config": {
            "quantizer": {"name": "blockgtq", "k_bits": 3, "v_bits": 3},
            "task": {"perplexity": {"stride": 512}},
        },
        "baselines": {"fp16": measurement("fp16", 16, 0.0021, 24.94), "tqmse": measurement("tqmse", 3, 4.263, 32.58)},
        "environment": Environment(
            kvbench="0.1.0",
            python="3.11.9",
            platform="Linux x86_64",
            packages={"torch": "2.13.0", "transformers": "5.24.0"},
            device="cpu",
            threads=2,
            attention_baseline="sdpa (math)",
        ),
        **changes,
    }
    return Result(**fields)


def renamed(name: str) -> Result:
    """A result in which every free name is ``name``."""
    base = result()
    return base.model_copy(
        update={
            "quantizer": base.quantizer.model_copy(
                update={"name": name, "distribution": name, "parameters": {name: name}}
            ),
            "model": base.model.model_copy(update={"name": name}),
            "tasks": {**base.tasks, name: TaskRecord(status="failed", error=name, metrics={name: 1.0}, notes=[name])},
            "baselines": {**base.baselines, name + "2": base.baselines["tqmse"]},
            "command": f"kvbench quantizer={name}",
            "corpus": {"name": name},
            "config": {name: name},
        }
    )
