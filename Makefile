# Without PYTHON= the targets make a virtual environment in $(VENV) and install the project into it. With it, as in
# `make test-gpu PYTHON=python3`, they use that interpreter as it is, the checkout on its path, and install nothing.

VENV ?= .venv
TORCH ?= torch==2.13.0
BASE_PYTHON ?= python3
ARGS ?=
JOBS ?= 2

ifeq ($(origin PYTHON),command line)
READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.installed
endif

export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.PHONY: help demo test test-gpu check fmt bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(READY) ## compile a small Qwen3-Next with FP8 layers and show what was fused (ARGS=--json for JSON)
	@$(PYTHON) -m gdn_backend demo $(ARGS)

test: $(READY) ## tests that need no GPU, in JOBS=2 processes (ARGS=... goes to pytest)
	$(PYTHON) -m pytest --numprocesses $(JOBS) --dist loadfile $(ARGS)

test-gpu: $(READY) ## tests that need a GPU
	$(PYTHON) -m pytest -m gpu $(ARGS)

check: $(READY) ## lint, format and types; changes nothing
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

fmt: $(READY) ## format the code and sort its imports
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: $(READY) ## time the kernels on this machine's GPU
	$(PYTHON) -m gdn_backend bench $(ARGS)

# torch first and by version: asked for as a dependency, it would come as whichever multi-gigabyte build is newest.
$(VENV)/.installed: pyproject.toml
	test -x $(VENV)/bin/python || $(BASE_PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet "$(TORCH)"
	$(VENV)/bin/python -m pip install --quiet --editable ".[hf,test]"
	touch $@
