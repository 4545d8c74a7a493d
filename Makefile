# `make demo` and `make test` on a machine with Python >= 3.11 and make. VENV, PYTHON and PIP_ARGS can be given.
VENV ?= .venv
PYTHON ?= python3
PIP_ARGS ?=
BIN = $(VENV)/bin
INSTALL = $(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

# Timings on a CPU mislead without these: spinning threads fight over shared cores, and glibc would hand every large
# tensor back to the system after each use.
export OMP_WAIT_POLICY = PASSIVE
export MALLOC_MMAP_THRESHOLD_ = 2147483647
export MALLOC_TRIM_THRESHOLD_ = 17179869184

.PHONY: help demo test lint docs laws clean

help:
	@echo "make demo   set up, train one Transformer with each of six norms, compare, fold: about six minutes"
	@echo "make test   set up, then everything that CI runs: lint, types, tests, doctests, examples, docs"
	@echo "make lint   ruff and pyright alone"
	@echo "make docs   the documentation as a site, in site/"
	@echo "make laws   docs/laws.md, the table of norms and laws, from a run of the tests"
	@echo "make clean  remove $(VENV) and what was built"

demo: $(VENV)/.demo
	$(BIN)/normkit demo $(DEMO_ARGS)

test: $(VENV)/.dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --cov=normkit --cov-report=term $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory docs

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

laws: $(VENV)/.dev
	$(BIN)/python tests/law_table.py

clean:
	rm -rf $(VENV) build dist site

# A stamp is written last, so a set-up that was interrupted starts over where it can and is finished the next time.
$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python >= 3.11, found " + sys.version.split()[0] + "; give another as make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt
	@$(MAKE) --no-print-directory $(VENV)/bin/python
	$(BIN)/python -m pip --version > /dev/null || $(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	$(INSTALL) -e ".[demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(INSTALL) -e ".[demo,dev]"
	@touch $@
