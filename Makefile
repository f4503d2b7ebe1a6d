# Every target sets itself up in .venv. PYTHON chooses the interpreter the environment is made from.
PYTHON ?= python3
VENV := .venv
RUN := PYTHONPATH=tests $(VENV)/bin/python
STAMP := $(VENV)/.installed
# Debian and Ubuntu keep the venv module in a package of its own.
ENSURE_VENV_MODULE = $(PYTHON) -c "import ensurepip" 2>/dev/null || \
	{ test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq python3-venv; }

# Two ranks on a CPU; GPUs where there are any: make demo DEMO_FLAGS="--devices cuda:0,cuda:1"
DEMO_FLAGS ?=
PYTEST_FLAGS ?=
PARITY_FLAGS ?=

.PHONY: help venv test parity demo lint format types imports clean

help:
	@echo "make venv | test | parity | demo | lint | format | types | imports | clean"

venv: $(STAMP)

$(STAMP): pyproject.toml requirements.txt constraints.txt tests/host/install.py tests/host/fetch.py tests/host/mend_cpu_torch.py
	test -x $(VENV)/bin/python || { $(ENSURE_VENV_MODULE) && $(PYTHON) -m venv $(VENV); }
	$(RUN) -m host.install
	touch $@

test: venv
	$(RUN) -m pytest $(PYTEST_FLAGS)

# Every kind of graph with the stock loader and with ours, under every kind of plan; writes docs/parity.md.
# Part of it: make parity PARITY_FLAGS="--only kontext --plan 'ring 2'"
parity: venv
	$(RUN) -m parity.matrix $(PARITY_FLAGS)

demo: venv
	$(RUN) -m demo.run $(DEMO_FLAGS)

lint: venv
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: venv
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

types: venv
	$(VENV)/bin/mypy

imports: venv
	$(RUN) tests/test_imports_point_down.py

clean:
	rm -rf $(VENV) build demo_output .pytest_cache .ruff_cache .mypy_cache
