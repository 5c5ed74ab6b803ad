# `make demo` and `make test` set everything up by themselves; `make help` lists the rest.
# PYTHON=/path/to/python chooses the interpreter that .venv is made from.
# PY=python3 skips the set-up and uses that interpreter as it is (no install, no network).

SHELL := /bin/bash
VENV := .venv
OLDEST := .venv-oldest
OLDEST_TORCH := 2.11
# The tests that touch private names of torch most: .ci/run has them run with the oldest torch too.
OLDEST_PART := $(patsubst %,tests/test_%.py,compat trace trace_inside trace_writes ops operators compiled dtensor precision \
	optimizers attention_cuda attention_flex cuda_kernels device real_ranks distributed)
# One more than the cores of a small machine: some tests wait for processes. Each takes about 1.5 GB.
JOBS ?= 3
ARGS ?=
# Kinds of devices whose kernels `make wheel` compiles.
NATIVE ?=

ifeq ($(origin PY), undefined)
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
DOCS_READY := $(VENV)/.docs-ready
else
export PYTHONPATH := $(CURDIR):$(CURDIR)/tools/inplace$(if $(PYTHONPATH),:$(PYTHONPATH))
READY :=
DOCS_READY :=
endif

# Ranks are simulated in one process and tests run side by side: one thread each, unless the caller says otherwise.
test sweep: export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test oldest oldest-part check sweep sanitize cuda bench gpu docs wheel clean

help:            ## this list
	@grep -E '^[a-z-]+: .*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

$(VENV)/.ready: pyproject.toml constraints.txt setup.py tools/setup_venv.py
	@$(or $(shell command -v python3),$(PYTHON),python3) tools/setup_venv.py ".[dev,models]"
	@touch $@

$(VENV)/.docs-ready: $(VENV)/.ready
	@$(PY) -m pip install --quiet --disable-pip-version-check -e ".[docs]" -c $(VENV)/constraints.txt
	@touch $@

setup: $(READY)  ## the virtual environment only
	@true

demo: $(READY)   ## train a small GPT on a simulated 2x2 mesh
	@$(PY) examples/train_gpt.py $(ARGS)

# Before all tests the kernels are compiled, once for all workers, or found in the user's cache. Without a compiler they run without.
test: $(READY)   ## the default tests (ARGS="-k name" to choose)
	@$(if $(ARGS),,export TESTS_KERNELS="$$($(PY) -m colofunc native cpu)";) $(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

oldest: $(OLDEST)/.ready  ## the same with the oldest torch that is supported, in .venv-oldest
	@$(MAKE) --no-print-directory test PY=$(CURDIR)/$(OLDEST)/bin/python

oldest-part: $(OLDEST)/.ready  ## those of them that touch private names of torch most
	@$(MAKE) --no-print-directory test PY=$(CURDIR)/$(OLDEST)/bin/python ARGS="$(OLDEST_PART) $(ARGS)"

$(OLDEST)/.ready: pyproject.toml constraints.txt
	@echo "colofunc: setting up $(OLDEST) with torch $(OLDEST_TORCH) (some minutes, about 6 GB on disk)"
	@$(or $(PYTHON),$(wildcard $(VENV)/bin/python),python3) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install -qq --disable-pip-version-check --no-input "torch==$(OLDEST_TORCH).*" -e ".[dev,models]" -c constraints.txt
	@$(OLDEST)/bin/python -c "import torch"
	@touch $@

check: $(READY)  ## lint, strict types, import order
	@status=0; $(PY) -m ruff check . || status=1; $(PY) -m mypy || status=1; \
	$(PY) -m pytest -q tests/test_layers.py || status=1; exit $$status

sweep: $(READY)  ## the longer sweeps over models, operators and meshes
	@$(PY) -m pytest -n $(JOBS) --dist worksteal -m sweep $(ARGS)

sanitize: $(READY)  ## tests of the kernels in C++ under the sanitizers of addresses and undefined behaviour
	@$(PY) tools/sanitize.py $(ARGS)

cuda: $(READY)   ## compile the kernels for A100s and H100s and load them (needs nvcc, no GPU)
	@$(PY) tools/compile_cuda.py

bench: $(READY)  ## the benchmark table
	@$(PY) -m bench $(ARGS)

gpu: $(READY)    ## what only a GPU can say, into bench/GPU.md (ARGS="--slice 4")
	@$(PY) -m bench gpu $(ARGS)

docs: $(DOCS_READY)  ## the documentation as a site in site/
	@NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

wheel: $(READY)  ## a wheel of both packages in dist/ (NATIVE="cpu cuda": with compiled kernels, for such machines as this)
	@rm -rf build ext/cuda/compiled; trap 'rm -rf build ext/cuda/compiled' EXIT; \
	$(if $(NATIVE),$(PY) -m colofunc native $(NATIVE) --into ext/cuda/compiled >/dev/null &&) \
	$(PY) -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	@ls dist/*.whl

clean:           ## remove .venv and everything built
	rm -rf $(VENV) $(OLDEST) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
