# One command each for what a newcomer does. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

# The torch build to install. Default: the pinned release. On a GPU machine name the build that fits your CUDA,
# with pip's own options if need be: make .venv TORCH="torch==2.13.0 --index-url URL_OF_YOUR_CUDA_BUILD"
TORCH ?= $(shell grep '^torch==' constraints.txt)

# Exact versions for everything else; CONSTRAINTS=/dev/null takes the newest that setup.py allows.
CONSTRAINTS ?= constraints.txt

# The demo's seed and number of processes; DEMO_ARGS takes any further flags of examples/demo.py.
SEED ?= 0
NPROC ?= 2
DEMO_ARGS ?=

# Two spinning threads beside another busy process are 5 to 20 times slower than one: one thread per process.
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE

.DEFAULT_GOAL := help
.PHONY: help .venv demo test slurm-test lint format clean

help: ## list the targets and variables
	@grep -E '^[.a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12
	@printf '\nVariables: PYTHON=%s TORCH="%s" CONSTRAINTS=%s SEED=%s NPROC=%s DEMO_ARGS="%s" PYTEST_ARGS=\n' \
		'$(PYTHON)' '$(TORCH)' '$(CONSTRAINTS)' '$(SEED)' '$(NPROC)' '$(DEMO_ARGS)'

.venv: $(INSTALLED) ## create .venv with megarl, its pinned dependencies and the developer tools

# torch goes first and alone, so that no dependency pulls another build of it; then everything else at the pinned
# versions. The pin of torch itself is left out of the second step: TORCH may have chosen another release.
$(INSTALLED): setup.py constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install $(TORCH)
	sed '/^torch==/d' $(CONSTRAINTS) > .venv/constraints.txt
	$(BIN)/pip install -c .venv/constraints.txt -e '.[dev,mpi]'
	touch $(INSTALLED)

demo: $(INSTALLED) ## train a tiny Qwen to sort digits: warm start, GRPO, curves and summary in runs/demo
	$(BIN)/python examples/demo.py --seed $(SEED) --nproc $(NPROC) $(DEMO_ARGS)

test: $(INSTALLED) ## run the test suite
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# Slurm itself is Debian's; where it is missing and can't be installed, the tests that need it are skipped and say so.
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
APT_INSTALL := DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(SLURM_PACKAGES)
slurm-test: $(INSTALLED) ## run the scripts of slurm/ in a private Slurm cluster on this machine (ten minutes)
	@$(BIN)/python tests/slurm/cluster.py --check || [ "$$(id -u)" != 0 ] || ! command -v apt-get || \
		$(APT_INSTALL) || { apt-get update && $(APT_INSTALL); } || true
	SLURM_TESTS=1 $(BIN)/python -m pytest tests/slurm -rs $(PYTEST_ARGS)

lint: $(INSTALLED) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(INSTALLED) ## let ruff fix and format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv and tool caches (runs/ stays)
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache build ./*.egg-info
