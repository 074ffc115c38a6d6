# kvferry: the commands of the README. `make help` lists them.

VENV ?= .venv
PYTHON ?=
VLLM ?= auto
ARGS ?=

BOOT := $(or $(PYTHON),python3)
RUN := $(VENV)/bin/python
# perf/ and tests/ start vLLM; nothing they do should leave the machine
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1

define environment
	@command -v $(BOOT) >/dev/null 2>&1 || { echo "kvferry: $(BOOT) not found: install Python 3.11, 3.12 or 3.13 (on Debian and Ubuntu: apt install python3 python3-venv)" >&2; exit 1; }
	@$(BOOT) requirements/environment.py $(1) --venv "$(VENV)" --python "$(PYTHON)" --vllm "$(VLLM)"
endef

.DEFAULT_GOAL := help
.PHONY: help demo test venv lint bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo
	@echo "variables: PYTHON=/path/to/python  VENV=folder  VLLM=auto|cpu|gpu|none  ARGS='more arguments'"

demo: ## environment, then a real engine: cold, warm and in a new process
	$(call environment,demo)
	$(VENV)/bin/kvferry demo $(ARGS)

test: ## environment, then all tests
	$(call environment,test)
	$(RUN) -m pytest $(ARGS)

venv: ## the development environment, with the checkers
	$(call environment,dev)
	@echo "ready: . $(VENV)/bin/activate"

lint: ruff format mypy pyright codespell ## every checker: ruff, mypy, pyright, codespell

.PHONY: checkers ruff format mypy pyright codespell
ruff format mypy pyright codespell: checkers

checkers:
	$(call environment,dev)

ruff:
	$(RUN) -m ruff check .

format:
	$(RUN) -m ruff format --check .

mypy:
	$(RUN) -m mypy

pyright:
	$(RUN) -m pyright --pythonpath $(RUN)

codespell:
	$(RUN) -m codespell_lib

bench: ## environment, then every script of perf/
	$(call environment,test)
	@for script in perf/bench_*.py; do \
	  [ -e "$$script" ] || { echo "perf/ holds no bench_*.py"; break; }; \
	  name=$$(basename "$$script" .py); echo "== perf.$$name"; $(RUN) -m perf.$$name $(ARGS) || exit 1; \
	done

clean: ## remove the environment, builds and caches
	rm -rf "$(VENV)" build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage .coverage.*
