# `make demo` and `make test` work from a bare clone: each goes through `make setup` first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup test test-fast durations coverage docs docs-build demo reach waypoints lint slow-test clean

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
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

# The inner loop, two minutes: the tests of each room without those that tests/durations.json lists as slow, without the
# training runs and without the commands of the documentation. `make durations` measures the tests again.
test-fast: setup
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal --fast \
		--ignore tests/test_docs.py --ignore tests/training --ignore tests/benchmarks

durations: setup
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal --store-durations

# The whole suite with line coverage of deft/, reported by file.
coverage: setup
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal --cov=deft --cov-report=term:skip-covered

# The documentation, with warnings as errors: docs/build/html.
docs-build: setup
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/build/html

docs: docs-build
	$(BIN)/python -m http.server --directory docs/build/html --bind 127.0.0.1 8000

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

slow-test: setup
	$(BIN)/python -m pytest -m slow

# The three phases of F1 on the embedded tabletop, in about ten minutes on two cores; prints where its report is.
demo: setup
	$(BIN)/python -m deft.demo

# PPO on the embedded Reach world, in a minute.
reach: setup
	$(BIN)/python -m deft.demo reach

# Records driving, trains a waypoint policy on it, refines it with PPO, and compares the two: out/waypoints.
WAYPOINTS := out/waypoints
waypoints: setup
	$(BIN)/deft collect waypoints --out $(WAYPOINTS)/driving.npz --overwrite
	$(BIN)/deft train waypoint-sft --dataset $(WAYPOINTS)/driving.npz --out-dir $(WAYPOINTS)/sft --overwrite
	$(BIN)/deft train waypoint-ppo --sft-checkpoint $(WAYPOINTS)/sft --out-dir $(WAYPOINTS)/ppo --env driving \
		--rollout-steps 32 --residual-modes 2 --num-iterations 300 --eval-interval 50 --overwrite
	$(BIN)/deft compare --sft-checkpoint $(WAYPOINTS)/sft --rl-checkpoint $(WAYPOINTS)/ppo

clean:
	rm -rf $(VENV) build docs/build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
