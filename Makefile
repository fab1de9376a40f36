# Everything runs in .venv, made on first use from this project's own files. Python 3.11 or newer is all that is needed.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet

.PHONY: help demo test test-slow lint check format bench mutants clean

help:            ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/ready  ## set up, train the tiny model, show what it has learnt
	$(BIN)/turnwise train recipes/calculator.yaml output=runs/demo replace=true

test: $(VENV)/ready-dev  ## set up, run the quick tests
	$(BIN)/python -m pytest -m 'not slow'

test-slow: $(VENV)/ready-dev  ## the tests that kill, resume and train for real
	$(BIN)/python -m pytest -m slow

lint: $(VENV)/ready-dev  ## format, lint, types, and that what is made by a command is up to date
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python scripts/option_table.py --check
	$(BIN)/python scripts/metric_table.py --check
	$(BIN)/python scripts/mask_view.py --check
	$(BIN)/python scripts/tool_call_table.py --check
	$(BIN)/python scripts/template_table.py --check
	$(BIN)/python scripts/doctor_page.py --check
	$(BIN)/python scripts/measure.py --check

check: lint test  ## what a change must pass

format: $(VENV)/ready-dev  ## put the code into shape
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready-dev  ## the benchmarks, a table each
	$(BIN)/python benchmarks/tokens.py
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/local_engine.py
	$(BIN)/python benchmarks/against_trl.py

# PARTS="training rollout" and SAMPLE=100 keep it short; scripts/mutants.py says more
mutants: $(VENV)/ready-dev  ## which small changes of the code does no quick test notice? (hours; not in CI)
	$(PIP) -c constraints.txt -e '.[mutants]'
	nice -n 15 $(BIN)/python scripts/mutants.py $(PARTS) --sample $(or $(SAMPLE),0)

clean:           ## forget the environment and the caches; runs are kept
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: a version that is fine already is not fetched again with what the others would accept
$(VENV)/ready: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "setting up $(VENV) (a few minutes, once)"
	$(PIP) -c constraints.txt torch numpy
	$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@
