# `make run` trains the quickstart, `make test` runs the tests; both first make .venv and install everything.
# `make test-integrations` runs the tests with the frameworks hdet rides on, which it installs as well.
# `make test-extras` runs those with DeepSpeed, Ray, torchft and trackio, which it installs beside .venv: they take long
# to install, and would pin others back.
# With another Python, and the newest of everything: make test VENV=.venv-newest PYTHON=python3.13 CONSTRAINTS=/dev/null
#
# torch comes from pip's own index. For the smaller CPU build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make run

PYTHON ?= python3
VENV := .venv
CONSTRAINTS := constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INTEGRATED := $(VENV)/.integrated
EXTRAS := .venv-extras
EXTRA_INSTALLED := $(EXTRAS)/.installed
EXTRA_TESTS := test_deepspeed test_transformers_deepspeed test_ray_asha test_ray_example test_ray_pbt test_torchft test_torchft_exchange test_loggers

# Everything here is too small to gain much from a second thread, and threads that wait for each other on a
# busy machine are slower by far.
OMP_NUM_THREADS ?= 1
export OMP_NUM_THREADS

# Tests start Python a hundred times: what is imported is compiled once.
unexport PYTHONDONTWRITEBYTECODE

# Test files that run at a time. Many share processes between their tests, so none is divided, and the longest come first
# (tests/conftest.py). One more than two cores take: processes wait for each other.
WORKERS ?= 3
TOGETHER := -n $(WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: run test test-integrations test-extras lint docs diagrams example-runs install clean

run: $(INSTALLED)
	$(BIN)/hdet run examples/quickstart.yaml --compare --force

test: $(INSTALLED)
	$(BIN)/python -m pytest $(TOGETHER)

test-integrations: $(INTEGRATED)
	$(BIN)/python -m pytest $(TOGETHER) tests/integrations tests/test_docs.py::test_docstring_examples \
		tests/test_docs.py::test_every_python_block_runs -k 'integrations'

test-extras: $(EXTRA_INSTALLED)
	$(EXTRAS)/bin/python -m pytest --durations=0 --durations-min=1 $(EXTRA_TESTS:%=tests/integrations/%.py)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hdet benchmarks

# The site into site/; a broken link fails. The notice that is turned off advertises another program.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The drawings of docs/architecture.md; needs npm and a Chromium.
diagrams: $(INSTALLED)
	$(BIN)/python docs/pictures/diagrams.py

# The runs of docs/reading-a-report.md, with their pictures and tables; needs a Chromium.
example-runs: $(INSTALLED)
	$(BIN)/python docs/pictures/example_runs.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

# Of timm the schedulers are tested, which need neither its models nor the torchvision that these need.
$(INTEGRATED): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[integrations]'
	$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --no-deps timm
	touch $@

# All else is taken from .venv, by a file that names its folder. trackio takes another Pillow than constraints.txt has.
$(EXTRA_INSTALLED): $(INTEGRATED)
	test -x $(EXTRAS)/bin/python || $(BIN)/python -m venv $(EXTRAS)
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
		$$($(EXTRAS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth
	$(EXTRAS)/bin/python -m pip install --quiet --editable '.[deepspeed,ray,torchft,trackio]'
	touch $@

clean:
	rm -rf $(VENV) .venv-* runs site build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
