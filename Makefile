# Everything runs in a virtual environment that the first call makes: Python 3.11.4 or newer is all it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# What JAX has compiled is kept, so that the second run starts at once.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES ?= -1
# So is what Python has compiled, whatever the surroundings say: tests start some hundred processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo papers bench test lint types unit clean

help:  ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 10

$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(READY)  ## tune the loss of a long-tailed federated classifier, in about a minute
	$(BIN)/fedbilevel demo

# Two papers have a table1.toml: a folder for each paper keeps their runs apart.
papers: $(READY)  ## the papers' experiments in small, three seeds each: tables and figures in runs/
	for file in papers/*/*.toml; do name=$${file#papers/}; \
		$(BIN)/fedbilevel run $$file --preset small --quiet --out runs/$${name%.toml} || test $$? = 1 || exit; done
	for file in papers/*/*.py papers/*/*/__main__.py; do $(BIN)/python $$file || exit; done

# PyTorch is what some of them compare with; nothing else needs it.
bench: $(READY)  ## all benchmarks, in about a quarter of an hour: writes the table of docs/benchmarks.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[benchmarks]'
	$(BIN)/python scripts/benchmarks.py

test: lint types unit  ## style, types and all tests

lint: $(READY)  ## style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## types, strictly
	$(BIN)/mypy

unit: $(READY)  ## all tests
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

clean:  ## remove what the other targets made
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build src/*.egg-info
