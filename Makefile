# Every target makes its own virtual environment. On a fresh machine `make demo` or `make test` is all it takes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.installed
# The library and what it needs, without extras: all that `make demo` waits for.
LIBRARY := $(VENV)/.library
# One more than two processors: many tests wait, for processes that start or for a limit of time.
WORKERS ?= 3
# Tests start some hundred Python processes, which import torch in half the time if it is compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test quick thorough bench check format notebooks docs dist clean

help:  ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1	/p' $(MAKEFILE_LIST) | expand -t 14

demo: $(LIBRARY)  ## train a small GPT under ZeRO-3 on eight virtual devices (ARGS="--stage 1" and more)
	$(BIN)/python examples/train_gpt.py $(ARGS)

test: $(READY)  ## run every test: tests/, doctests, notebooks (ARGS="-k name" chooses, WORKERS=0 runs one at a time)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

# What everything else stands on, on virtual devices: layouts, collectives, ZeRO, batches, schedules, arrays.
QUICK := tests/test_architecture.py tests/test_training.py tests/mesh/layout tests/mesh/reshard/test_reshard.py \
    tests/mesh/spmd/test_shard_map.py tests/mesh/runtimes/test_virtual.py tests/mesh/collectives/test_conformance.py \
    tests/optim/test_norms.py tests/optim/test_sharded_optimizers.py tests/transforms/test_zero.py tests/transforms/test_batches.py \
    tests/pipeline/schedule/test_verify.py tests/pipeline/execution/test_pipelined.py tests/array/test_operations.py

quick: WORKERS = 2
quick: $(READY)  ## run the heart of the tests in 90 seconds, without processes
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(QUICK) -k "not processes and not direct" $(ARGS)

thorough: $(READY)  ## before a release: slow proofs too, all combinations, 500 drawn examples each (hours; ARGS=tests/mesh/collectives)
	FSHARD_EXAMPLES=thorough $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(ARGS)

bench: $(READY)  ## measure the collectives and print the table
	$(BIN)/python benchmarks/collectives.py

check: $(READY)  ## lint, format, types, import order, duplicated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/python -m pytest tests/test_architecture.py
	$(BIN)/pylint --disable=all --enable=duplicate-code fshard

format: $(READY)  ## rewrite the code as `check` wants it, where that can be done by machine
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

notebooks: $(READY)  ## execute the notebooks and write their outputs back
	$(BIN)/python tests/test_notebooks.py

docs: $(READY)  ## build the documentation site in build/docs, offline; warnings are errors
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going -d build/doctrees docs build/docs

dist: $(READY)  ## build wheel and sdist in dist/, and check them in a bare environment
	$(BIN)/python .ci/dist.py

clean:  ## remove the environment, caches and build output
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is written last: an interrupted install starts again.  Python compiles modules as they are imported: most never are.
$(LIBRARY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("fshard needs Python 3.11 or newer: make PYTHON=python3.x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable .
	@touch $@

$(READY): $(LIBRARY) tests/third_party.txt
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[test,hf,docs,dev]'
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --upgrade --target $(VENV)/third-party --requirement tests/third_party.txt || \
	    echo "tests/third_party.txt could not be installed: its tests will be skipped"
	@touch $@
