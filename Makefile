# Two commands do everything on a fresh machine (Python 3.11 or later, pip, make): `make demo` and `make test`.
PYTHON ?= python3
# Asked for by exact version first: a range would let pip take a newer build with several gigabytes of CUDA packages.
TORCH ?= torch==2.13.0

VENV := .venv
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE ?= 1

.PHONY: install demo test lint bench clean

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install --quiet "$(TORCH)"
	$(VENV)/bin/pip install --quiet --editable ".[bench,demo,dev]"
	touch $(STAMP)

demo: install
	$(VENV)/bin/vlora demo --out demo

test: install
	$(VENV)/bin/python -m pytest -q

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: install
	$(VENV)/bin/vlora bench all

clean:
	rm -rf $(VENV) build *.egg-info demo
