# Every target sets up what it needs in .venv and is instant when nothing changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: help demo test quick check docs bench clean
help:
	@echo "make demo    train two small networks with five optimizers each and write a report"
	@echo "make test    run the tests"
	@echo "make quick   run the tests but the slow ones"
	@echo "make check   lint, types, import rules"
	@echo "make docs    build the documentation into site/"
	@echo "make bench   measure optimizer steps against torch's"

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

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses 2

quick: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not slow"

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict

bench: $(VENV)/.installed-lab
	$(BIN)/rootfree bench

clean:
	rm -rf $(VENV) site build dist .mypy_cache .ruff_cache
