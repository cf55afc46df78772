# make demo   set up .venv and benchmark Block-GTQ on a real model; ARGS="quantizer.k_bits=2" adds options
# make test   set up .venv with the development tools, check and test everything
# make test-transformers TRANSFORMERS=5.17.0   the tests that meet transformers, on another release of it
# make gallery   docs/gallery anew: a sweep on a real model, tens of minutes on two CPU cores, and its comparison
# make comparators   docs/comparators.md anew: every built-in quantizer on a real model; ARGS="device=cuda" on a GPU
# make sanitize   every Triton kernel once under NVIDIA's compute-sanitizer, memcheck and racecheck; needs a GPU
# Versions come from constraints.txt. Setting up again is skipped while it and pyproject.toml stay the same.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS ?=

TRANSFORMERS ?= 5.17.0
OTHER := .venv-transformers-$(TRANSFORMERS)
# Two test processes of one thread each: torch's own threads would fight over two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.PHONY: demo test test-transformers gallery comparators sanitize format clean

demo: $(VENV)/.installed
	$(BIN)/kvbench $(ARGS)

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) --numprocesses 2

# The other release lies in a folder of its own, in front of the one in .venv.
test-transformers: $(VENV)/.installed-dev
	$(BIN)/python -m pip install --quiet --upgrade --target $(OTHER) \
		transformers==$(TRANSFORMERS) $(shell grep ^numpy== constraints.txt)
	PYTHONPATH=$(OTHER) $(PYTEST) tests/kvbench/test_packed_cache.py tests/kvbench/test_engagement.py \
		tests/kvbench/test_calibrate.py tests/kvbench/test_conf_models.py tests/kvbench/test_models.py \
		tests/kvbench/test_packed_equals_simulation.py tests/kvbench/test_peers.py

# A small one to try: make gallery GALLERY=/tmp/gallery GALLERY_RUNS=/tmp/gallery-runs GALLERY_BITS=3 ARGS=model=random
GALLERY := docs/gallery
GALLERY_RUNS := outputs/gallery
GALLERY_BITS := 2,3,4
KERNEL_RESULTS := benchmarks/results/h200-2026-11-30.json
gallery: $(VENV)/.installed
	rm -rf $(GALLERY_RUNS)
	$(BIN)/kvbench -m quantizer=tqmse,blockgtq,cblockgtq quantizer.k_bits=$(GALLERY_BITS) \
		'quantizer.v_bits=$${quantizer.k_bits}' task=[logit_error,perplexity,fidelity] task.logit_error.tokens=1024 \
		$(ARGS) hydra.sweep.dir=$(GALLERY_RUNS)
	$(BIN)/kvbench report $(GALLERY_RUNS) --out $(GALLERY)/smollm2 --format html,md,csv
	$(BIN)/kvbench report $(GALLERY_RUNS) --out $(GALLERY)/figures/smollm2 --format svg
	$(BIN)/python -m kvbench.reports.kernel_page $(KERNEL_RESULTS) --out $(GALLERY)/kernels.html
	if find benchmarks/results -name result.json | grep -q .; then \
		$(BIN)/kvbench report benchmarks/results --out $(GALLERY)/gpu --format html,md,csv; fi

COMPARATOR_RUNS := outputs/comparators
comparators: $(VENV)/.installed-dev
	for sweep in comparators comparators_windows comparators_decode comparators_peers; do \
		$(BIN)/kvbench -m experiment=$$sweep $(ARGS) hydra.sweep.dir=$(COMPARATOR_RUNS)/$$sweep || exit 1; done
	$(BIN)/python -m kvbench.reports.comparators_page $(COMPARATOR_RUNS)

# Without PyTorch's caching every tensor is an allocation of its own, so that a step past the end of one is seen.
sanitize: $(VENV)/.installed-dev
	for tool in memcheck racecheck; do \
		PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 \
			$(BIN)/python -P benchmarks/sanitize.py || exit 1; done

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-transformers-* build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "kvbench needs Python 3.11 or newer: make PYTHON=python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) --editable '.[dev]'
	@touch $@ $(VENV)/.installed
