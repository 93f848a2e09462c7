# quickstart  train the calculator agent on this machine; nothing but python3 (3.11 or newer) is needed
# test        install what the tests need and run them
# test-slow   what takes long: crashes, all recipes, stopped engines (about seven minutes); CI runs it too
# check       all that must be clean before a commit: format, lint, types, tests (warnings are errors)
# lint        the static part of check
# bench       engine, learner and parity against their references (about ten minutes; leave the machine alone)
# bench-rl    the RL stage to 95 %, another commit and TRL's trainer beside it; needs a finished run: make bench-rl RUN=runs/calculator BEFORE=COMMIT

PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test test-slow check lint bench bench-rl clean

quickstart: .venv/.run-ready
	$(BIN)/soloist run calculator

test: .venv/.dev-ready
	$(BIN)/python -m pytest

test-slow: .venv/.dev-ready
	$(BIN)/python -m pytest -m slow

check: lint test

lint: .venv/.dev-ready
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python benchmarks/readme.py --check

bench: .venv/.dev-ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/engine.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/learner.py
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/parity.py --write

bench-rl: .venv/.dev-ready .venv-trl/.ready
	$(BIN)/python benchmarks/end_to_end.py $(RUN) --before $(BEFORE) --trl $(CURDIR)/.venv-trl/bin/python

clean:
	rm -rf .venv .venv-trl

# TRL lives in an environment of its own; it is no dependency.
.venv-trl/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-trl
	.venv-trl/bin/python -m pip install --quiet torch==2.13.0
	.venv-trl/bin/python -m pip install --quiet -c constraints.txt trl==1.16.0 -e .
	touch $@

# Stamps: set-up is done again only when the dependencies change.
.venv/.run-ready: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	touch $@

.venv/.dev-ready: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	touch $@ .venv/.run-ready

.venv/bin/python:
	@$(PYTHON) -c 'import platform, sys; sys.exit(None if sys.version_info >= (3, 11) else "Soloist needs Python 3.11 or newer, but $(PYTHON) is " + platform.python_version() + "; name another: make PYTHON=python3.12 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv .venv || (rm -rf .venv; exit 1)
