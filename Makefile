# `make demo` and `make test` each install what they need into .venv first.
#   make test PYTHON=/path/to/python3.12      choose the interpreter
#   make test PYTEST_ARGS='-k adamw -x'       pass arguments on to pytest
#   make demo ARGS='--steps 20'               pass arguments on to the demo

VENV := .venv
BIN := $(VENV)/bin
BENCH ?= $(sort $(wildcard bench/[!_]*.py))
WORKERS ?= 2

# An unset PYTHON means: find one (see .ci/bootstrap).
PYTHON ?=
export PYTHON
# Node comes from the wheel beside pyright, so neither asks the network for anything.
export PYRIGHT_PYTHON_GLOBAL_NODE := 0
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test lint format notebooks bench clean
.NOTPARALLEL:

help:
	@echo 'make demo       train a small GPT on a simulated mesh and print what it communicated'
	@echo 'make test       format, lint, layers, types, tests, notebooks'
	@echo 'make lint       the first four of these'
	@echo 'make format     rewrite the sources as `make lint` wants them'
	@echo 'make notebooks  run the notebooks and keep their new outputs'
	@echo 'make bench      run bench/*.py (BENCH=bench/step.py runs one)'
	@echo 'make clean      remove .venv and all caches'

$(VENV)/.installed-%: pyproject.toml constraints.txt .ci/bootstrap
	@bash .ci/bootstrap $*

demo: $(VENV)/.installed-cli
	$(BIN)/python models/demo.py $(ARGS)

# pytest is last, so that its closing line is the last one printed; it runs the notebooks too.
test: lint
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

notebooks: $(VENV)/.installed-dev
	$(BIN)/jupyter-execute --inplace $(sort $(wildcard notebooks/*.ipynb))

bench: $(VENV)/.installed-bench
	@for script in $(BENCH); do echo "== $$script"; $(BIN)/python $$script $(ARGS) || exit 1; done

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
