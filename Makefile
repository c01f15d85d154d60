# `make run` trains the quickstart, `make test` runs the tests; both first make .venv and install everything.
#
# torch comes from pip's own index. For the smaller CPU build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make run

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

# Everything here is too small to gain much from a second thread, and threads that wait for each other on a
# busy machine are slower by far.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

.PHONY: run test lint install clean

run: $(INSTALLED)
	$(BIN)/hdet run examples/quickstart.yaml --compare --force

test: $(INSTALLED)
	$(BIN)/python -m pytest

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hdet

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
