# `make demo` and `make test` work in a fresh clone; no setup needed.

SHELL := /bin/bash
VENV := .venv
STAMP := $(VENV)/installed
# Exists during an installation: an interrupted one may have left a partial package and is started over.
HALF := $(VENV)/half_installed
RUN := $(VENV)/bin/python -m
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow browser lint format docs clean
.DELETE_ON_ERROR:

# Scripts of a virtual environment contain its path: one that was moved or copied is created again.
$(shell [ ! -e $(STAMP) ] || [ "$$(cat $(STAMP))" = "$$(pwd -P)" ] || mv $(STAMP) $(HALF))

help:
	@echo "make demo       the whole workflow in minutes: train on two ranks, generate through a kill, score, view (no network, no GPU)"
	@echo "make test       ruff, mypy, import-linter and the fast tests (with browser tests if Chromium is installed)"
	@echo "make test-slow  the slow tests"
	@echo "make browser    install Chromium for the browser tests, or print how to"
	@echo "make lint       only ruff, mypy and import-linter"
	@echo "make format     fix and format the code with ruff"
	@echo "make docs       regenerate docs/api.md and the types of the Python API from docstrings and settings"
	@echo "make clean      remove caches and build folders (keeps .venv and runs)"

$(STAMP): pyproject.toml constraints.txt tests/oracles.txt
	@set -e; start=$$(date +%s); \
	if [ -e $(HALF) ] || ! $(VENV)/bin/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    for python in $(PYTHON) python3.11 python3 python3.12 python3.13 python3.14; do \
	        if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found="$$python"; break; fi; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "make: python3 is $$(python3 --version 2>&1 || true)"; \
	        echo "  expected: Python 3.11 or newer"; \
	        echo "  to do:    install it, or give its path: make PYTHON=/path/to/python3.11 ..."; \
	        exit 2; \
	    fi; \
	    echo "Creating $(VENV) with $$("$$found" --version)"; \
	    "$$found" -m venv --clear $(VENV) || { \
	        echo "make: cannot create a virtual environment"; \
	        echo "  expected: the venv and ensurepip modules of $$found"; \
	        echo "  to do:    install them (Debian and Ubuntu: apt install python3-venv)"; \
	        exit 2; \
	    }; \
	fi; \
	touch $(HALF); \
	echo "Installing torch, then the other packages, into $(VENV) (a few minutes the first time)"; \
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0; \
	$(RUN) pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	rm -rf $(VENV)/oracles; $(RUN) pip install --quiet --disable-pip-version-check --no-deps --target $(VENV)/oracles -r tests/oracles.txt; \
	printf '%s' "$$(pwd -P)" > $(STAMP); rm $(HALF); \
	echo "Installed in $$(( $$(date +%s) - start )) s"

demo: $(STAMP)
	@$(VENV)/bin/halation demo

# One thread, because results depend on the number of threads; no AMX, because some machines report it but cannot use it.
test test-slow: export OMP_NUM_THREADS = 1
test test-slow: export ONEDNN_MAX_CPU_ISA = AVX512_CORE_BF16
test test-slow: export HF_HUB_OFFLINE = 1

lint: $(STAMP)
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	$(VENV)/bin/lint-imports

# Two groups beside each other: one in parallel, one serially (.ci/tests.py).
test: lint browser
	$(VENV)/bin/python .ci/tests.py $(PYTEST_ARGS)

# SLOW_CAP_S=1200 starts no test after that time, and a different part of the tests first for each commit.
SLOW_CAP_S ?= 0
test-slow: $(STAMP) browser
	$(VENV)/bin/python .ci/tests.py --slow --cap_s $(SLOW_CAP_S) $(PYTEST_ARGS)

# Never fails: without Chromium the browser tests are skipped with a reason.
browser:
	@found() { command -v chromium || command -v chromium-browser || command -v google-chrome; }; \
	found > /dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && [ -e /etc/debian_version ] && command -v apt-get > /dev/null; then \
	    echo "Installing Debian's Chromium for the browser tests"; \
	    export DEBIAN_FRONTEND=noninteractive; \
	    (apt-get update -qq && apt-get install -qq -y chromium) > /dev/null || true; \
	fi; \
	found > /dev/null || { \
	    echo "make: Chromium is not installed: the browser tests will be skipped"; \
	    echo "  expected: chromium, chromium-browser or google-chrome on the PATH"; \
	    echo "  to do:    install one (Debian: apt install chromium; as root, make browser does it)"; \
	}

format: $(STAMP)
	$(RUN) ruff check --fix
	$(RUN) ruff format

docs: $(STAMP)
	$(VENV)/bin/python docs/reference.py
	$(VENV)/bin/python docs/api_stub.py

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis src/halation.egg-info
	find src tests benchmarks recipes -name __pycache__ -type d -prune -exec rm -rf {} +
