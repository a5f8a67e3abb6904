# What people and CI run. Each target sets up what it needs; PYTHON chooses the interpreter.
PYTHON ?= python3
BIN := .venv/bin
RUNNABLE := .venv/.runnable
INSTALLED := .venv/.installed
COMPILED := .venv/.compiled

unexport PYTHONDONTWRITEBYTECODE  # tests start many processes: what they import is compiled once

.PHONY: demo docs compiled test test-all lint format bench gpu faults dist matrix clean

demo: $(RUNNABLE)  ## AFAB against 1F1B on a real transformer, with a report
	$(BIN)/ppbench sweep sweeps/1f1b_vs_afab.toml

docs: $(INSTALLED)  ## the documentation as a site, with a gallery of sweeps run for it: build/site/index.html
	$(BIN)/python docs/site/build.py

compiled: $(COMPILED)  ## what tests import: else all of their processes compile it at once

test: $(COMPILED)  ## four processes: starting and ending ranks leaves a core idle at times
	$(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder

test-all: $(COMPILED)  ## the same tests, randomised campaigns with all their examples
	$(BIN)/pytest --numprocesses 4 --dist loadfile --no-loadscope-reorder --thorough

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy tests/gpu
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED)  ## every claim, within an hour; on a quiet machine, nothing beside it
	$(BIN)/python -m benchmarks

gpu: $(INSTALLED)  ## what only a GPU can prove, in ten minutes: benchmarks/gpu.md; says so where there is none
	$(BIN)/python -m benchmarks.gpu

faults: $(INSTALLED)  ## kills sweeps at random, and checks that no work is lost
	$(BIN)/python -m benchmarks.faults --kills 50

dist: $(INSTALLED)  ## the wheels of ppbench-torch and ppbench-reader, and the sdist: build/dist
	$(BIN)/python -m hatchling build -d $(CURDIR)/build/dist
	cd packaging/reader && $(CURDIR)/$(BIN)/python -m hatchling build -t wheel -d $(CURDIR)/build/dist

matrix: $(INSTALLED)  ## the oldest and newest of all that it may be installed with: docs/reference/versions.md
	$(BIN)/python packaging/matrix.py

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(RUNNABLE): pyproject.toml constraints.txt  ## few of the modules are ever imported: these are compiled then
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; use make PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	touch $(RUNNABLE)

$(INSTALLED): $(RUNNABLE)  ## what tests, linters and the documentation need besides
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

$(COMPILED): $(INSTALLED)
	$(BIN)/pytest --collect-only --quiet > $@.log || { cat $@.log; false; }
	mv $@.log $@
