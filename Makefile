# `make` lists the targets. Everything runs from .venv, which `make setup` builds once and keeps current by stamp files.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
# The pins are those of Python 3.11.
PYTHON ?= $(firstword $(shell command -v python3.11 python3))
# First and pinned: left to a dependency, torch may come as a CUDA build of several gigabytes. Any build of this version
# will do, so `make setup TORCH="torch==2.13.0 --index-url ..."` may name another place for a CPU build.
TORCH ?= torch==2.13.0
# Their metadata asks for CUDA packages, hence --no-deps; what they need on a CPU is in the requirement files.
NO_DEPS := sglang==0.5.12.post1 mooncake-transfer-engine-non-cuda==0.3.13.post1 sglang-router==0.3.2
BUILD := setuptools==84.2.1 wheel==0.48.0
REQUIREMENTS := src/cp_shared_kv_cpu/requirements.txt tests/requirements.txt
# What Mooncake's shared object links to, as library:package.
LIBRARIES := libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

CP ?= 2

.PHONY: help setup libraries demo test test-fast mutants soak bench matrix seams lint clean

help: ## list the targets
	@echo "Usage: make TARGET"
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup: libraries $(STAMPS)/project ## make .venv with all that demo, test and lint need (about 3 minutes; at once when done)

libraries:
	@ldconfig=$$(command -v ldconfig || echo /sbin/ldconfig); known=$$("$$ldconfig" -p); missing=(); \
	for pair in $(LIBRARIES); do grep -q "$${pair%:*} " <<<"$$known" || missing+=("$${pair#*:}"); done; \
	if (($${#missing[@]} == 0)); then exit 0; fi; \
	if ((EUID == 0)); then sudo=(env); elif sudo -n true 2>/dev/null; then sudo=(sudo -n env); \
	else echo "Missing system libraries. As root: apt-get install $${missing[*]}" >&2; exit 1; fi; \
	command -v apt-get >/dev/null || { echo "Missing system libraries, by their Debian names: $${missing[*]}" >&2; exit 1; }; \
	echo "Installing $${missing[*]}"; \
	"$${sudo[@]}" apt-get update -qq; \
	"$${sudo[@]}" DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$${missing[@]}"

# A stamp for each step; a step is repeated when the files it is made from, or this file, change.
$(STAMPS)/venv:
	@echo "Making $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed, as PYTHON=...")'
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/torch: $(STAMPS)/venv Makefile
	@echo "Installing torch"
	@$(PIP) $(BUILD) $(TORCH)
	@touch $@

$(STAMPS)/requirements: $(STAMPS)/torch $(REQUIREMENTS)
	@echo "Installing what SGLang needs on a CPU, and the tools"
	@$(PIP) $(addprefix -r ,$(REQUIREMENTS))
	@touch $@

$(STAMPS)/sglang: $(STAMPS)/requirements
	@echo "Installing SGLang, Mooncake and the router"
	@$(PIP) --no-deps $(NO_DEPS)
	@touch $@

$(STAMPS)/project: $(STAMPS)/sglang setup.cfg pyproject.toml
	@echo "Installing this project, editable"
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

demo: setup ## stock SGLang beside CP shared KV on real servers; CP=4 for four ranks (about 2 minutes)
	@$(BIN)/python examples/pd_on_cpu.py --cp $(CP) $(DEMO_FLAGS)

test: setup ## all tests, real servers included
	@$(BIN)/python -m pytest $(PYTEST_FLAGS)

test-fast: setup ## the tests that start no ranks and no servers (about 4 minutes)
	@$(BIN)/python -m pytest -m "not e2e and not pd and not gloo and not slow" $(PYTEST_FLAGS)

mutants: setup ## break the product in small ways and see a test fail (about half an hour); MUTANTS="word ..." for some
	@cd tests && ../$(BIN)/python -m mutation $(MUTANTS)

soak: setup ## 10 minutes of mixed traffic, every answer compared with stock; SOAK_FLAGS="--seconds 3600 --cp 4 --fp8"
	@cd tests && ../$(BIN)/python -m soak $(SOAK_FLAGS)

bench: setup ## ratios and counts with their budgets, in one table (about 8 minutes); BENCH_FLAGS="--only gather slopes"
	@$(BIN)/python -m benchmarks $(BENCH_FLAGS)

matrix: setup ## the tests on each release of SGLang, into docs/releases.md (hours); RELEASES="0.5.13 0.5.19" for some
	@cd tests && ../$(BIN)/python -m matrix $(RELEASES) $(MATRIX_FLAGS)

seams: setup ## every seam of every supported release, read in its wheel (a minute, and 300 MB the first time)
	@cd tests && ../$(BIN)/python -m matrix --only seams --no-page

lint: setup ## ruff check, ruff format --check, mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean: ## remove caches and build output, but not .venv
	@rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} +
