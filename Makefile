# Commands of this project; `make demo` and `make test` work on a fresh machine with Python 3.11, make and g++.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
# One process per core, at most 4: each loads torch.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# Read from the environment by the commands, so that no quoting is needed.
export SLIDES MPP MODEL PORT

.PHONY: help setup demo ui test test-all bench mutants lint format lock clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(VENV)/.installed ## the environment, from the lock file

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "needs $(PYTHON); set PYTHON=... to use another 3.11 or 3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=24'
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup ## the whole pipeline on the demo cohort, or on SLIDES=... [MPP=...] [MODEL=...]
	@$(BIN)/python -m pipelines.demo

ui: setup ## the Dagster UI on the demo, or on SLIDES=... [PORT=...]
	@$(BIN)/python -m pipelines.demo --prepare-only
	@$(BIN)/python -m pipelines.demo.ui

test: setup ## all tests but the slow ones
	$(PYTEST) -m 'not slow and not gpu'

test-all: setup ## every test this machine can run
	$(PYTEST) -m 'not gpu'

bench: setup ## what reading and answering tiles costs, printed and written to out/bench/; PART=read|runtime for one
	@$(if $(filter-out runtime,$(PART)),,$(BIN)/python -m benchmarks.runtime)
	@$(if $(filter-out read,$(PART)),,$(BIN)/python -m benchmarks.read)

mutants: setup ## known faults, put back one at a time: each must turn its test red
	@$(BIN)/python -m tests.mutants.run

lint: setup ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup ## mend what can be mended
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## resolve every extra anew into constraints.txt
	$(PYTHON) .ci/lock.py

clean: ## remove everything made here
	rm -rf out $(VENV)
