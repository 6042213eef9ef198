# `make serve` and `make test` do everything from a fresh clone: what they need is set up first, once.
SHELL := bash
VENV := .venv
PYTHON_BIN := $(VENV)/bin/python
READY := $(VENV)/.setup-done

MODEL ?=
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup serve demo test test-slow check format bench clean

help: ## list what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: $(READY) ## make .venv and install headway with its tools (once; again when the pins change)

$(READY): pyproject.toml constraints.txt scripts/setup.sh scripts/build_native.sh CMakeLists.txt $(wildcard csrc/*)
	@scripts/setup.sh $(VENV)
	@touch $@

serve: $(READY) ## serve a model over the OpenAI API; MODEL=folder-or-gguf HOST=... PORT=... ARGS="--max-num-seqs 64 ..."
	@exec $(VENV)/bin/headway serve $(MODEL) --host $(HOST) --port $(PORT) $(ARGS)

demo: $(READY) ## serve the embedded model, send it 64 ShareGPT requests, print the table, stop
	@$(PYTHON_BIN) scripts/demo.py

test: $(READY) ## all tests but the slow ones
	$(PYTHON_BIN) -m pytest

test-slow: $(READY) ## the slow tests
	$(PYTHON_BIN) -m pytest -m slow

check: $(READY) ## formatting, lint, types, layering
	$(VENV)/bin/ruff format --check src tests benchmarks scripts
	$(VENV)/bin/ruff check src tests benchmarks scripts
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-cache

format: $(READY) ## let ruff format and fix
	$(VENV)/bin/ruff format src tests benchmarks scripts
	$(VENV)/bin/ruff check --fix src tests benchmarks scripts

bench: $(READY) ## the benchmarks that need nothing else, quickly; `python benchmarks/NAME.py` runs one in full
	@for script in $(filter-out %/peers.py,$(shell grep -l 'arguments(__doc__)' benchmarks/*.py)); do \
	    echo "== $$script --quick"; $(PYTHON_BIN) $$script --quick || exit 1; done

clean: ## remove .venv, caches and build products
	rm -rf $(VENV) build dist src/*.egg-info src/headway/kernels/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} +
