# `make demo` and `make test` on a machine with Python >= 3.11 and make. VENV, PYTHON and PIP_ARGS can be given.
VENV ?= .venv
PYTHON ?= python3
PIP_ARGS ?=
BIN = $(VENV)/bin
# worksteal keeps the tests of a file in one process, which then makes their module fixtures once
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

# Timings on a CPU mislead without these: spinning threads fight over shared cores, and glibc would hand every large
# tensor back to the system after each use.
export OMP_WAIT_POLICY = PASSIVE
export MALLOC_MMAP_THRESHOLD_ = 2147483647
export MALLOC_TRIM_THRESHOLD_ = 17179869184

# Where it is set and pip did not compile packages, each process compiles its imports again: Lightning takes 25 s, not 10.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test tests coverage lint docs clean

help:
	@echo "make demo   set up, train one Transformer with each of four norms, compare, fold: four to eight minutes"
	@echo "make test   set up, then everything that CI runs: lint, types, docs, tests, doctests, examples"
	@echo "make tests  the tests, doctests and examples alone"
	@echo "make coverage  the tests alone, with the lines of normkit that they run; a third slower"
	@echo "make lint   ruff and pyright alone"
	@echo "make docs   the documentation as a site, in site/"
	@echo "make clean  remove $(VENV) and what was built"
	@echo
	@echo "DEMO_ARGS and PYTEST_ARGS are passed on; PYTHON=python3.12 and PIP_ARGS=... change the set-up."

demo: $(VENV)/.demo
	$(BIN)/papers demo $(DEMO_ARGS)

test: $(VENV)/.dev
	$(MAKE) --jobs=3 lint docs tests  # lint and docs use one core each, and end before the tests

tests: $(VENV)/.dev
	$(PYTEST) $(PYTEST_ARGS)

coverage: $(VENV)/.dev
	$(PYTEST) --cov=normkit --cov=normkit_papers --cov-report=term $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/lint-imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict  # no --quiet: it would hide from --strict what it counts

clean:
	rm -rf "$(VENV)" build dist site

# A stamp is written last. What an interrupted set-up left behind may look installed without being whole, so the next
# try, which finds `.unfinished`, installs over all of it.
define set_up
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "normkit needs Python >= 3.11 as $(PYTHON); name another: make PYTHON=python3.12"; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Setting up $(VENV): a minute or two"
	@again=$$(test ! -e $(VENV)/.unfinished || echo --ignore-installed); touch $(VENV)/.unfinished; \
		$(BIN)/python -m pip install -q --disable-pip-version-check $(PIP_ARGS) -c constraints.txt $$again $(PACKAGES)
	@mv $(VENV)/.unfinished $@
endef

$(VENV)/.demo: PACKAGES = -e . -e papers
$(VENV)/.demo: pyproject.toml papers/pyproject.toml constraints.txt
	$(set_up)

$(VENV)/.dev: PACKAGES = -e ".[dev]" -e "papers[ray,text,vision]"
$(VENV)/.dev: $(VENV)/.demo
	$(set_up)
