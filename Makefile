# Every target sets up what it needs in .venv and is instant when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

# The environments in which pip builds this project have the pinned versions too.
export PIP_CONSTRAINT := constraints.txt
export PIP_BUILD_CONSTRAINT := constraints.txt

.PHONY: help demo test test-all check docs bench audit lock lock-check dist clean
help:
	@echo "make demo    train two small networks with six optimizers each and write a report"
	@echo "make test    run the tests but the slow ones (4 minutes on two cores)"
	@echo "make test-all  run all tests (10 minutes)"
	@echo "make check   lint, types, import rules"
	@echo "make docs    build the documentation into site/"
	@echo "make bench   measure optimizer steps against torch's"
	@echo "make audit   check the licences and known vulnerabilities of what is installed"
	@echo "make lock    write constraints.lock, the hashes of what constraints.txt pins"
	@echo "make lock-check  download what is pinned and compare its hashes"
	@echo "make dist    build the wheel and the source distribution into dist/"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and by its exact version: left to the resolver, a plain "torch" may be the newest one.
$(VENV)/.installed-lab: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) $$(grep '^torch==' constraints.txt)
	$(PIP) --editable '.[lab]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-lab
	$(PIP) --editable '.[dev]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-lab
	$(PIP) --editable '.[docs]'
	@touch $@

demo: $(VENV)/.installed-lab
	$(BIN)/rootfree demo

PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

test-all: $(VENV)/.installed-dev
	$(PYTEST)

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.installed-lab
	$(BIN)/rootfree bench

audit: $(VENV)/.installed-dev
	$(BIN)/python tools/audit.py

lock: | $(BIN)/python
	$(PIP) uv
	$(BIN)/uv --quiet pip compile constraints.txt --no-deps --generate-hashes --universal \
		--python-version 3.11.5 --no-header --no-annotate --output-file constraints.lock

lock-check: | $(BIN)/python
	$(BIN)/python tools/audit.py --hashes

dist: $(VENV)/.installed-dev
	$(BIN)/python -m hatchling build

clean:
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache
