# Every target works from a bare clone. Those that train need .venv with the runtime dependencies (`make install`); those
# that test or build the documentation need the developer extras too (`make setup`).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install setup test test-fast durations coverage docs docs-build demo phases reach waypoints lint slow-test clean

install: $(VENV)/.runtime
	@bash scripts/system_packages.sh

setup: $(VENV)/.installed
	@bash scripts/system_packages.sh

$(VENV)/.runtime: pyproject.toml scripts/install.sh
	@bash scripts/install.sh $(PYTHON) $(VENV)
	@touch $@

$(VENV)/.installed: $(VENV)/.runtime
	@bash scripts/install.sh $(PYTHON) $(VENV) dev
	@touch $@

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

# A policy that ships with Deft plays, trains with RL on this machine, and plays again: six minutes on two cores.
demo: install
	@$(BIN)/python -m deft.demo

# The three phases of F1 on the embedded tabletop, in about ten minutes on two cores; prints where its report is.
phases: install
	@$(BIN)/python -m deft.demo phases

# PPO on the embedded Reach world, in a minute.
reach: install
	@$(BIN)/python -m deft.demo reach

# Records driving, trains a waypoint policy on it, refines it with PPO, and compares the two: out/waypoints.
WAYPOINTS := out/waypoints
waypoints: install
	$(BIN)/deft collect waypoints --out $(WAYPOINTS)/driving.npz --overwrite
	$(BIN)/deft train waypoint-sft --dataset $(WAYPOINTS)/driving.npz --out-dir $(WAYPOINTS)/sft --overwrite
	$(BIN)/deft train waypoint-ppo --sft-checkpoint $(WAYPOINTS)/sft --out-dir $(WAYPOINTS)/ppo --env driving \
		--rollout-steps 32 --residual-modes 2 --num-iterations 300 --eval-interval 50 --overwrite
	$(BIN)/deft compare --sft-checkpoint $(WAYPOINTS)/sft --rl-checkpoint $(WAYPOINTS)/ppo

clean:
	rm -rf $(VENV) build docs/build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
