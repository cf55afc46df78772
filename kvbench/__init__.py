"""kvbench: a benchmark harness and plugin registry for LLM KV-cache quantizers."""

__version__ = "0.1.0"
