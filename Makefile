# make demo    tune and train handwritten digits on this machine, from nothing, in the folder demo/
# make test    the linters, the type checker and every test
# make test-whole  the same with the long matrices whole, of which `make test` runs a sample (half an hour)
# make costs   make test, and a record of what each file of tests costs: docs/tests.md
# make equality  every knob under every way of training, beside torch alone, bit by bit (an hour)
# make fuzz    a long run of the fuzz tests: 100,000 inputs for each reader in tests/security, and for tests/topology
# make traces  158 ways of writing files and seven frameworks, each at every level of isolation (25 minutes)
# make compat  46 scripts of frameworks and of plain torch, unmodified, beside torchrun: docs/compatibility.md (half an hour)
# make clusters  every platform on two hosts, pods, and a real Slurm, as root (ten minutes)
# make faults  faults of every kind at every moment of a tuning job, on one host and on two, as root (two hours)
# make endurance  200 starts with an exception, 100 killed launchers, 30 broken outputs, 50 tunings in a row (an hour)
# make mutations  60 random faults in autoddp, and how many of them the tests notice (half an hour)
# tests/gpu/run.sh   what only a CUDA device can show, on a bare machine: a table, one process a check
# make clean   remove what the two have made, the virtual environment included
#
# On a fresh machine both first make .venv with everything in it. Variables that may be set (make TORCH=torch demo):
PYTHON ?= python3
# What pip installs as torch. The version is fixed because torchvision has to match it.
TORCH ?= torch==2.13.0
TORCHVISION ?= torchvision==0.28.0
# VENV_FLAGS=--system-site-packages keeps the torch (and torchvision) that PYTHON already has.
VENV_FLAGS ?=
# Four at once keep two cores busy: a job of 2 to 4 processes often waits, for a signal, a limit or a peer.
PYTEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder

# Where it is set, each of hundreds of processes compiles autoddp and its tests anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
# Judged as pip judges: the folder of a package is there too after an installation that was cut off.
HAS = $(BIN)/python -c 'import sys, importlib.metadata as m; sys.exit(not any(m.distributions(name="$(1)")))'

.PHONY: demo test types pytest test-whole costs equality fuzz traces compat clusters faults endurance mutations clean
.DEFAULT_GOAL := test

# demo/ ignores itself, so that no run of the demo shows up in git.
demo: .venv/.ready
	@mkdir -p demo && echo '*' > demo/.gitignore
	cd demo && ../$(BIN)/autoddp --nproc-per-node 2 --trials 20 ../recipes/digits/train.py
	@echo "demo: now on your own script: $(CURDIR)/$(BIN)/autoddp --nproc-per-node 2 --trials 20 train.py"

test: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types pytest

# Side by side: the type checker uses one core, for half a minute in a fresh clone.
types: .venv/.ready
	$(BIN)/mypy

pytest: .venv/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-whole: .venv/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS) --whole --timeout 1500

# A .venv without pip was cut off, or made on a Debian that lacks python3-venv: it is made whole.
OLD = import sys; sys.exit(sys.version_info < (3, 10) and "setup: $(PYTHON) is older than 3.10: make PYTHON=python3.12 demo")
# torch comes first: with no torch present, pip would take the newest one for autoddp's "torch>=2.6". torchvision comes
# last and without its dependencies, because it would replace that torch.
.venv/.ready: pyproject.toml
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "setup: making .venv"; $(PYTHON) -c '$(OLD)' && $(PYTHON) -m venv $(VENV_FLAGS) .venv; }
	@$(call HAS,torch) || { echo "setup: installing $(TORCH)"; $(PIP) '$(TORCH)'; }
	@echo "setup: installing autoddp and the tools for its tests"
	@$(PIP) -e '.[test]'
	@$(call HAS,torchvision) || { echo "setup: installing $(TORCHVISION) for the ViT recipe"; $(PIP) --no-deps '$(TORCHVISION)'; }
	@touch $@

# What each file of tests costs, as `make test` runs it: tests/costs.json, and a table.
costs: .venv/.ready
	$(BIN)/python -m pytest $(PYTEST_ARGS) --record-costs
	$(BIN)/python tests/costs.py

# What follows are the campaigns, long runs with a command of their own: campaigns/README.md has their last results.

# Each cell of the matrix of knobs and ways of training.
equality: .venv/.ready
	$(BIN)/python campaigns/equality/matrix.py

# The readers of what others have written against damaged inputs: so many for each property of tests/topology (26 of
# them), and 25 times as many for each reader in tests/security (13).
FUZZ_EXAMPLES ?= 4000
fuzz: .venv/.ready
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/python -m pytest -n 2 --timeout 0 tests/topology tests/security -k 'any_text or matrix or fuzz'

# As root, with Debian's strace; the frameworks are the extra `compat`.
traces: .venv/.ready
	@$(PIP) -e '.[test,compat]'
	$(BIN)/python campaigns/traces/run_all.py --json traces.json

# timm would bring a torchvision of its own, and that another torch: setup has installed the one that matches.
# DeepSpeed has no wheel and compiles one operator, with the torch that is here.
compat: .venv/.ready
	@$(PIP) -e '.[test,compat]'
	@$(call HAS,deepspeed) || { echo "setup: compiling deepspeed"; $(PIP) setuptools wheel ninja py-cpuinfo hjson einops \
	  && DS_BUILD_OPS=0 DS_BUILD_SHM_COMM=1 $(PIP) --no-build-isolation deepspeed; }
	$(BIN)/python -m pytest --whole tests/campaigns/test_compat.py
	$(BIN)/python campaigns/compat/run_all.py --json compat.json --page docs/compatibility.md

# As root, with Debian's slurm-wlm and munge; the forms of code for frameworks are tried with the extra `compat`.
clusters: .venv/.ready
	@$(PIP) -e '.[test,compat]'
	$(BIN)/python -m pytest --whole tests/cluster tests/own_code

faults: .venv/.ready
	$(BIN)/python campaigns/faults/matrix.py --at-once 2 --results faults.jsonl

mutations: .venv/.ready
	$(BIN)/python campaigns/mutations.py

endurance: .venv/.ready
	$(BIN)/python campaigns/faults/endurance.py --at-once 2 --results endurance.jsonl

clean:
	rm -rf .venv demo .autoddp build *.egg-info .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
