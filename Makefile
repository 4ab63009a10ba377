# make setup   virtual environment with pinned dependencies in .venv (again: does nothing)
# make demo    text -> tokenizer -> tokens -> BF16 and FP8 training -> report -> Hugging Face export
# make test    lint, types, and every test that is not slow
# make soak    faults at random moments of one run for 15 minutes, then the same run without, and a table
#
# PYTHON=python3.12   the interpreter to build .venv with
# GPU=1               also install Transformer Engine (needs NVIDIA's CUDA toolkit: nvcc)
SHELL := /bin/bash
PYTHON ?= python3
GPU ?= 0
VENV ?= .venv
PY := $(VENV)/bin/python
# its own stamp, so that GPU=1 also works after a setup without
READY := $(VENV)/.ready$(if $(filter 1,$(GPU)),-gpu)
PIP := $(PY) -m pip --disable-pip-version-check install --quiet --constraint requirements.lock
WORKERS ?= 2
MINUTES ?= 15
SEED ?= 1
# one thread a process: the tests start processes of their own, and threads would fight over the cores
TEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 MPLBACKEND=Agg $(PY) -m pytest -n $(WORKERS) --dist worksteal --durations=15

.PHONY: setup demo test test-all soak bench lint types format clean
.DEFAULT_GOAL := setup

setup: $(READY)

$(READY): setup.py requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "make setup: $(PYTHON) is missing or older than 3.10; install Python >= 3.10 or name one: make setup PYTHON=python3.12" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "make setup: $(PYTHON) has no venv module; on Debian or Ubuntu: sudo apt-get install python3-venv" >&2; exit 2; }
	@if [ "$(GPU)" = 1 ] && ! command -v nvcc >/dev/null; then \
	  echo "make setup: GPU=1 builds Transformer Engine and needs nvcc of NVIDIA's CUDA toolkit on PATH" >&2; exit 2; fi
	@echo "setup: $(VENV) with $$($(PYTHON) -V) (the first time downloads PyTorch and takes minutes)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --editable '.[dev]' setuptools
	@# megatron-core is what tests compare file formats with; where it does not install, those tests say so
	@$(PIP) --no-deps megatron-core || echo "setup: megatron-core did not install; tests/contract will say so"
	@# Transformer Engine's Python alone, away from the path: without its compiled part an import of it fails
	@$(PIP) einops onnxscript && $(PIP) --no-deps --upgrade --target $(VENV)/contract transformer-engine || \
	  echo "setup: transformer-engine's wheel did not install; tests/contract/test_te_* will say so"
	@if [ "$(GPU)" = 1 ]; then $(PIP) --no-build-isolation --editable '.[gpu]' || { \
	  echo "make setup: Transformer Engine did not build, see above; make setup without GPU=1 gives the rest" >&2; exit 2; }; fi
	@touch $@ $(VENV)/.ready
	@echo "setup: done; source $(VENV)/bin/activate, then: megafp8 --help"

demo: $(READY)
	@PATH="$(abspath $(VENV))/bin:$$PATH" bash examples/tiny_cpu/demo.sh

lint: $(READY)
	$(PY) -m ruff check .

format: $(READY)
	$(PY) -m ruff check --fix-only . && $(PY) -m ruff format .

types: $(READY)
	$(PY) -m mypy

test: lint types
	$(TEST) -m "not slow and not gpu" tests

test-all: lint types
	$(TEST) tests

soak: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m tests.faults.soak --minutes $(MINUTES) --seed $(SEED)

bench: $(READY)
	$(PY) -m benchmarks

clean:
	rm -rf build *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
