# On a bare Linux machine (x86-64) with Python 3.11 to 3.13: `make test` (every proof once),
# `make test-all` (full products) and `make demo`. All make or reuse .venv, with the exact versions
# of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
RUNS := runs/demo
# further overrides for the training of `make demo`, and for its decoding
DEMO ?=
DECODE ?=
TORTURE ?=
# Where it is set, every process that a test starts would compile the sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: install test test-all exhaustive torture fuzz audit demo gpu-test clean

install: .venv/installed

# requirements.txt holds constraints.txt with hashes, but for torch, of which any build will do; what
# torch needs beside is there when it comes, unless it is a CUDA build.
.venv/installed: pyproject.toml constraints.txt requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

test: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal \
		-m "not exhaustive and not gpu"

# The full products as well: every family with every option, every study, every command of the docs.
test-all: test exhaustive

exhaustive: install
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m "exhaustive and not gpu"

# A hundred kills at random moments: every command goes on and ends bit-equal; and two thousand
# prompts, over which nothing grows. TORTURE="--seed 1
# --kills 10" changes how many of which.
torture: install
	$(BIN)/python -m tests.torture $(TORTURE)
	$(BIN)/python -m pytest -q -s tests/long_run.py

# Random cases of greedy decoding, each compared with transformers' own generate.
fuzz: install
	$(BIN)/python -m tests.decoding.fuzz_generate $(or $(COUNT),10000)

# What is known against the versions of requirements.txt; needs the network.
audit: install
	$(BIN)/python -m pip install --quiet pip-audit
	$(BIN)/pip-audit --disable-pip --requirement requirements.txt

# Train a speculator for the shipped target on answers of its own, then compare all ways to decode.
demo: install
	rm -rf $(RUNS)
	WANDB_MODE=$${WANDB_MODE:-offline} $(BIN)/python train.py experiment=streaming_demo \
		output_dir=$(RUNS)/train $(DEMO)
	$(BIN)/python infer.py experiment=demo speculator_path=$(RUNS)/train/model \
		output_dir=$(RUNS)/infer $(DECODE)

# The checks that need a CUDA device, for a machine that has one.
gpu-test: install
	$(BIN)/python -m pytest -m gpu tests/gpu
	SLIPSTREAM_TEST_DEVICE=cuda $(BIN)/python -m pytest -m "not exhaustive" \
		$(addprefix tests/decoding/test_,greedy_identity.py batches.py fuzz_generate.py)

clean:
	rm -rf .venv $(RUNS)
