# `make demo` and `make test` work from a bare clone: each goes through `make setup` first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup test demo lint slow-test clean

setup: $(VENV)/.installed
	@bash scripts/system_packages.sh

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Deft needs Python 3.11 or newer: make PYTHON=python3.11 …"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

test: setup lint
	$(BIN)/python -m pytest

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow-test: setup
	$(BIN)/python -m pytest -m slow

demo: setup
	$(BIN)/python -m deft.demo

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
