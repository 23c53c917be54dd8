# Commands of this project; `make demo` and `make test` work on a fresh machine with Python 3.11, make and g++.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

SLIDES ?=
MPP ?=
MODEL ?=
DEMO = $(BIN)/python -m pipelines.demo --slides '$(SLIDES)' --mpp '$(MPP)' --model '$(MODEL)'

.PHONY: setup demo ui test test-all lint format lock clean

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "needs $(PYTHON); set PYTHON=... to use another 3.11 or 3.12"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=24'
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup ## the whole pipeline on the demo cohort, or on SLIDES=... [MPP=...] [MODEL=...]
	@$(DEMO)

ui: setup ## the Dagster UI on the demo, or on SLIDES=...
	@$(DEMO) --prepare-only
	@$(BIN)/python -m pipelines.demo.ui --slides '$(SLIDES)' --mpp '$(MPP)' --model '$(MODEL)'

test: setup ## all tests but the slow ones
	$(BIN)/python -m pytest -m 'not slow and not gpu'

test-all: setup ## every test this machine can run
	$(BIN)/python -m pytest -m 'not gpu'

lint: setup ## style, types, direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: ## resolve every extra anew into constraints.txt
	$(PYTHON) .ci/lock.py

clean:
	rm -rf out $(VENV)
