PYTHON ?= python3
VENV ?= .venv
JAX ?= jax
BIN = $(VENV)/bin
OUT ?= plait-demo

.PHONY: demo test sweep check mutants clean

demo: $(VENV)/.installed
	$(BIN)/plait demo --out $(OUT)

test: $(VENV)/.installed check
	$(BIN)/python -m pytest -n 2 -m "not slow"

sweep: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 -m slow tests

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

mutants: $(VENV)/.installed
	$(BIN)/python tests/mutants.py

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "plait needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(JAX)" -e '.[dev]'
	@touch $@

clean:
	rm -rf .venv* build dist $(OUT)
