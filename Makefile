# Each target makes the environment it needs from the Python found; nothing has to be set up before.
#
#   make test        everything in tests/ but the tier on a real vLLM (TESTS=tests/unit/render, ARGS=-x to narrow it)
#   make test-vllm   a real vLLM on this machine's CPU (VLLM=0.32.0): minutes, 3.4 GB in ~/.cache/vllmdiag the first time
#   make demo        one fault, live: a miniature server is started, broken, diagnosed and removed, in seconds
#   make lint        ruff and mypy
#   make bench       what is measured, with the peers it is measured against
#   make pyz         dist/vllmdiag.pyz: one file that needs a Python and nothing else
#   make dist        wheel and source archive in dist/
#   make generated   what is written from the program itself: man page, the session in the README, figures
#   make format      let ruff put things in order

PYTHON ?= python3
VENV   ?= .venv
VLLM   ?= 0.32.0
TESTS  ?= tests
ARGS   ?=

BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := $(VENV)/.installed-dev

.PHONY: test test-vllm demo lint bench pyz dist generated format clean
.DEFAULT_GOAL := test

# What users get is enough for the demo. Twice quiet: what pip only warns of is no news here.
$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --editable .
	@touch $@

# Dependency groups (PEP 735) need pip 25.1.
$(TOOLS): $(STAMP)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check 'pip>=25.1'
	@$(BIN)/python -m pip install -qq --disable-pip-version-check --group dev
	@touch $@

test: $(TOOLS)
	$(BIN)/python -m pytest $(TESTS) --ignore=tests/vllm $(ARGS)

test-vllm: $(TOOLS)
	VLLM=$(VLLM) $(BIN)/python -m pytest tests/vllm $(ARGS)

demo: $(STAMP)
	@$(BIN)/vllmdiag lab run worker-stopped $(ARGS)

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(TOOLS)
	@$(BIN)/python -m bench $(ARGS)

pyz: $(TOOLS)
	@$(BIN)/python -m tools.zipapp $(ARGS)

dist: $(TOOLS)
	@$(BIN)/python -m hatchling build

generated: $(TOOLS)
	@$(BIN)/python -m tools.manpage
	@$(BIN)/python -m tools.verbs
	@$(BIN)/python -m tools.session
	@$(BIN)/python -m tools.figures

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
