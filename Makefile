# Two commands do everything on a fresh machine (Python 3.11 or later, pip, make): `make demo` and `make test`.
# `make test-fast` is for the edit loop.
PYTHON ?= python3
# Asked for by exact version first: a range would let pip take a newer build with several gigabytes of CUDA packages.
TORCH ?= torch==2.13.0

VENV := .venv
STAMP := $(VENV)/.installed
export HF_HUB_OFFLINE ?= 1

.PHONY: install demo docs test test-all test-gpu-sim test-touched test-release test-fast console-test lint bench gpu clean

install: $(STAMP)

$(STAMP): pyproject.toml
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(VENV)/bin/pip install "$(TORCH)"
	$(VENV)/bin/pip install --editable ".[serve,cluster,events,mcp,tracing,fuse,bench,demo,dev]"
	touch $(STAMP)

# The API reference, docs/reference/*.md, from docstrings.
docs:
	$(PYTHON) docs/make_reference.py

demo: install
	$(VENV)/bin/vlora demo --out demo

# The CPU kernels are compiled once before the workers start, which would each compile them.
KERNELS := $(VENV)/.kernels
$(KERNELS): $(STAMP) $(wildcard atmm/cpu/*.*)
	$(VENV)/bin/python -c "import atmm; atmm.load_kernels()"
	touch $@

# One more worker process than cores (tests/conftest.py); `make test WORKERS=0` runs all in one process.
WORKERS ?= auto
# Bytecode is cached even where the environment turns that off: otherwise each worker, and each process that a test
# starts, compiles the project again.
PYTEST = PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest -q -n $(WORKERS) --dist worksteal \
	--durations 30 --durations-min 8

test: install $(KERNELS)
	$(PYTEST)

# With the tests of more model families, forms, sizes and moments and kinds of failure (the mark `exhaustive`).
test-all: install $(KERNELS)
	$(PYTEST) --exhaustive

# Kernels in Triton's interpreter, the simulated GPU, compiled GPU kernels (the mark `gpu_sim`).
test-gpu-sim: install $(KERNELS)
	$(PYTEST) --gpu-sim --exhaustive -m gpu_sim

# The tests that only these two run, of the packages that differ from the last full run (tests/touched.py), as many as
# begin within LIMIT_S seconds of the first. Exit code 5 of pytest: there are none. Files begin in the given order, and
# tests of one file stay in theirs: some need what earlier ones have made.
LIMIT_S ?= 100
test-touched: install $(KERNELS)
	@set -e; folders=$$($(VENV)/bin/python -m tests.touched); echo "touched: $${folders:-nothing}"; \
	if [ -n "$$folders" ]; then \
		$(PYTEST) --dist loadfile --no-loadscope-reorder --gpu-sim --exhaustive -m "gpu_sim or exhaustive" \
			--stop-after $(LIMIT_S) $$folders || test $$? = 5; \
	fi

# Before a release: all tiers, and their result in tests/full_run.json.
test-release: install $(KERNELS)
	bash -o pipefail -c '$(PYTEST) --gpu-sim --exhaustive | tee $(VENV)/full-run.txt'
	$(VENV)/bin/python -m tests.touched --record "$$(tail -n 1 $(VENV)/full-run.txt)"

# For the edit loop: without the tests marked as slow, and with fewer hypothesis examples (tests/conftest.py).
test-fast: install $(KERNELS)
	$(PYTEST) -m "not slow"

# The console's page in a real browser, which is a system package (Debian and Ubuntu: apt-get install chromium).
CHROMIUM ?= $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

console-test: install
	@test -n "$(CHROMIUM)" || { echo "error: no Chromium here; apt-get install chromium, or make console-test CHROMIUM=/path" >&2; exit 1; }
	$(VENV)/bin/pip install --quiet --editable ".[console]"
	CHROMIUM="$(CHROMIUM)" $(VENV)/bin/python -m pytest -q tests/console

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: install
	$(VENV)/bin/vlora bench all

# For a GPU machine, with the Python that has torch there: installs nothing. Repeat until no stage is left; docs/gpu.md.
GPU_OUT ?= gpu-results
gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) -m vlora.cli gpu-check --out $(GPU_OUT)

clean:
	rm -rf $(VENV) build *.egg-info demo
