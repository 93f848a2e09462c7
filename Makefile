# quickstart  train the calculator agent on this machine; nothing but python3 (3.11 or newer) is needed
# test        install what the tests need and run them
# check       all that must be clean before a commit: format, lint, types, tests (warnings are errors)
# lint        the static part of check

PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test check lint clean

quickstart: .venv/.run-ready
	$(BIN)/soloist run calculator

test: .venv/.dev-ready
	$(BIN)/python -m pytest

check: lint test

lint: .venv/.dev-ready
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/python benchmarks/readme.py --check

clean:
	rm -rf .venv

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
