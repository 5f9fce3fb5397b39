# make run    sets everything up and runs the nested loop on this machine, then writes a report
# make test-fast  the fast test suite alone: under three minutes on two cores, with one nested loop end to end
# make test   the same set-up, all checks, the documentation, the fast suite, the long tests and the red team
# make test-slow  what takes minutes: chaos, fuzzing by the hundred thousand, real jobs, the dashboard in chromium
# make check  lint, types, import contracts, spelling (no tests)
# make docs   the documentation site, written to build/docs; any warning is an error
# make bench  the benchmarks of this machine, written to results/bench/
# make figures  every figure and table of results/ again, from the data committed there

SHELL := /bin/bash
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do command -v $$p >/dev/null && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# TORCH_ARGS can name another source of torch, for example one that carries CPU-only builds.
TORCH ?= 2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.nestling-ready
export OMP_NUM_THREADS ?= 1
# Many tests start fresh processes, which would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/pytest -q -n auto --dist worksteal

.PHONY: run test check bench figures docs setup system clean test-fast test-slow

setup: $(STAMP) system

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Nestling needs Python 3.11 or newer; install it or pass PYTHON=/path/to/python" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install -q --no-deps torch==$(TORCH) $(TORCH_ARGS)
	$(PIP) install -q --no-deps --require-hashes -r constraints.txt
	$(PIP) install -q --no-deps --no-build-isolation -e .
	touch $@

# Agent code only runs inside a bubblewrap jail; install it where that is allowed, else say how.
system:
	@if command -v bwrap >/dev/null; then :; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "installing bubblewrap"; apt-get -qq update >/dev/null 2>&1 || true; apt-get -qq install -y bubblewrap >/dev/null; \
	else echo "bubblewrap is missing; agent-written code cannot be run without it. Install it with: sudo apt-get install bubblewrap (Debian, Ubuntu), sudo dnf install bubblewrap (Fedora)" >&2; fi

run: setup
	$(BIN)/nestling run recipes/quick.toml

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell src docs README.md CHANGELOG.md CONTRIBUTING.md

test-fast: setup
	$(PYTEST)

test-slow: setup
	$(BIN)/pytest -q -m "(slow or browser) and not gpu and not live and not parity"

test: setup check docs
	$(PYTEST)
	$(PYTEST) -m "long and not slow and not gpu and not live and not parity and not browser"
	$(BIN)/nestling redteam

docs: setup
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/docs

bench: setup
	$(BIN)/nestling bench all --out results/bench

figures: $(STAMP)
	$(BIN)/nestling report results --redraw

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
