# The few words of this project. `make run` and `make test` need Python 3.11+ and nothing else.
#
#   PYTHON           the interpreter to make .venv with (default: the first of python3, python3.14 .. 3.11 that is new enough)
#   TORCH_INDEX_URL  where torch comes from: give the URL of an index of CPU builds to do without CUDA
#   BENCH, SOAK, CHAOS, FUZZ, MUTANTS, UP, ARGS  arguments of `make bench`, `make soak`, `make chaos`, `make fuzz`,
#                    `make mutants`, `make run`, `make unit`, `make test` and `make test-all`
#   REDIS_SERVER     of `make redis`: the program, called redis-server or valkey-server
#   LOCK             arguments of `make lock`: LOCK=--upgrade for the newest versions, LOCK="-P redis" for one package's
#   TRITON_PYTHON    of `make conformance`: interpreter of a virtual environment with nvidia-pytriton 0.7.0 (Triton 2.51)

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Everything that comes from outside is checked against the hashes in the locks, but torch: each index has its own builds.
# Not quiet: it is the large one, and a download without a sign of life looks like one that hangs.
INSTALL_TORCH := $(filter-out --quiet,$(INSTALL)) --no-deps $(if $(TORCH_INDEX_URL),--extra-index-url $(TORCH_INDEX_URL)) -r torch.lock
INSTALL_LOCKED := $(INSTALL) --require-hashes -c requirements.lock -r /dev/stdin
INSTALL_PROJECT := $(INSTALL) --quiet --no-deps --no-build-isolation -e . -e client
LOCK_FLAGS := --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
  --custom-compile-command "make lock" $(LOCK)

.DEFAULT_GOAL := help
.PHONY: help install run console vad unit test test-all redis cluster coverage sim gpu conformance check docs format reference e2e bench soak chaos fuzz mutants perf-analyzer lock clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 24

$(BIN)/python:
	@deploy/make_venv.sh $(VENV) "$(PYTHON)"

# Stamps: an installation is repeated when what it installs from has changed, and not otherwise.
$(VENV)/.installed-run: pyproject.toml client/pyproject.toml requirements.lock torch.lock bootstrap.lock | $(BIN)/python
	@echo "installing seqmesh into $(VENV); the first time takes a few minutes, torch is large"
	@$(INSTALL) --require-hashes -r bootstrap.lock
	@$(INSTALL_TORCH)
	@echo "installing what torch and the services need"
	@$(BIN)/python deploy/requirements_of.py gateway scheduler executor console local | $(INSTALL_LOCKED)
	@$(INSTALL_PROJECT)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-run
	@$(BIN)/python deploy/requirements_of.py dev docs vad s3 gcs azure | $(INSTALL_LOCKED)
	@touch $@

$(VENV)/.installed-vad: $(VENV)/.installed-run
	@$(BIN)/python deploy/requirements_of.py vad | $(INSTALL_LOCKED)
	@touch $@

# The pages need no torch: a machine that only builds them installs nothing else.
$(VENV)/.installed-docs: pyproject.toml requirements.lock bootstrap.lock | $(BIN)/python
	@$(INSTALL) --require-hashes -r bootstrap.lock
	@$(BIN)/python deploy/requirements_of.py docs | $(INSTALL_LOCKED)
	@touch $@

install: $(VENV)/.installed-dev  ## everything, with what the tests need, into .venv

run: $(VENV)/.installed-run  ## a mesh with the sample models on this machine, until Ctrl-C
	@exec $(BIN)/seqmesh up $(UP)

vad: $(VENV)/.installed-vad  ## speech and pauses found in recordings, while an executor is killed (`seqmesh demo vad`)
	@exec $(BIN)/seqmesh demo vad $(ARGS)

unit: install  ## the tests that need no server and start no process, in a minute or two
	$(BIN)/python -m pytest -n 2 -m unit $(ARGS)

# Three workers are right for two cores. tests/tiers.py says which tests are long.
test: install  ## the tests of every change: units, servers, shared meshes, kills of each service; ARGS="-n 6": six workers
	$(BIN)/python -m pytest -n 3 -m "not long and not e2e and not bench" $(ARGS)

test-all: install  ## all tests that need no Docker: those of `make test`, and those with meshes of their own, and trials
	$(BIN)/python -m pytest -n 3 $(ARGS)

redis: install  ## those of `make test` that are no units, on another server: REDIS_SERVER=/usr/bin/redis-server
	$(BIN)/python -m pytest -n 3 -m "not unit and not long and not e2e and not bench" \
	  --ignore=tests/deploy/test_embedded.py \
	  --redis-server=$(or $(REDIS_SERVER),$(shell command -v redis-server)) $(ARGS)

cluster: install  ## the everyday tests of whole meshes, each on a Redis Cluster of three nodes
	$(BIN)/python -m pytest -n 3 -m "not long" --redis-cluster tests/mesh $(ARGS)

coverage: install  ## which lines unit tests run, by module; ARGS="-m ''" for all tests in this process; build/coverage
	$(BIN)/python -m pytest -q -m unit --cov --cov-report=term:skip-covered --cov-report=html:build/coverage $(ARGS)

sim: install  ## whole meshes on virtual time, with faults; SEEDS=1000 FROM=1, a failing seed prints its story
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),1000) --from $(or $(FROM),1) $(SIM)

conformance: install  ## what a user of Triton sees; TRITON_PYTHON=.../python runs it on a real Triton
	TRITON_PYTHON="$(TRITON_PYTHON)" $(BIN)/python -m pytest tests/conformance $(ARGS)

gpu: install  ## what computes, on a GPU of this machine: its engines, meshes, and what happens when it is lost
	$(BIN)/python -m pytest --device cuda:0 tests/executor tests/mesh/test_lost_gpus.py tests/mesh/test_determinism.py \
	  $(ARGS)

check: install  ## style, format, strict types, import contracts, names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python -m tests.names

console:  ## builds the console's page from deploy/console/web into the package; needs node and npm
	cd deploy/console/web && npm ci --no-audit --no-fund && npm run build

docs: $(VENV)/.installed-docs  ## these pages as a site in build/site; a link that leads nowhere is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: install  ## writes every file as `make check` wants it
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

reference: install  ## writes docs/reference, the chart's schema and alerts, and the plain manifests
	$(BIN)/python -m tests.docs.reference
	$(BIN)/python -m tests.deploy.kubernetes

e2e: install  ## builds the images, starts them with docker compose, drives them, kills an executor
	$(BIN)/python -m pytest -m e2e --timeout=1800 tests/e2e $(ARGS)

bench: install  ## closed-loop load; BENCH="--triton" to compare with one
	$(BIN)/python -m benchmarks $(BENCH)

mutants: install  ## a sample of faults put into the code: who sees them? MUTANTS="--files shared --sample 20 --seed 7"
	$(BIN)/python -m tests.mutation $(MUTANTS)

perf-analyzer: install  ## Triton's load tool and Model Analyzer, fetched from PyPI, drive sequences; answers are checked
	PERF_ANALYZER=$$($(BIN)/python -m tests.conformance.fetch_perf_analyzer build/perf_analyzer) && \
	  MODEL_ANALYZER=$$($(BIN)/python -m tests.conformance.fetch_model_analyzer build/model_analyzer) && \
	  PERF_ANALYZER=$$PWD/$$PERF_ANALYZER MODEL_ANALYZER=$$MODEL_ANALYZER \
	  $(BIN)/python -m pytest tests/conformance/test_perf_analyzer.py $(ARGS)

soak: install  ## ten minutes of 128 streams: nothing wrong, nothing dead, nothing that grows; SOAK="--minutes 1"
	$(BIN)/python -m benchmarks.soak $(SOAK)

chaos: install  ## kills, freezes and cuts off a mesh under load, checks every answer; CHAOS="--seed 7 --steps 100000"
	$(BIN)/python -m deploy.cli chaos $(CHAOS)

fuzz: install  ## broken inputs of every kind, for ten minutes; FUZZ="--only http,grpc --minutes 60", --seed repeats one
	$(BIN)/python -m tests.fuzz $(FUZZ)

# Not `install`: what pyproject.toml asks for anew is in the lock only afterwards.
lock: | $(BIN)/python  ## writes requirements.lock and bootstrap.lock, with hashes
	@printf 'uv\n' | $(INSTALL_LOCKED)
	@$(BIN)/uv pip compile $(LOCK_FLAGS) --all-extras -c torch.lock --no-emit-package torch \
	  --no-emit-package seqmesh-client pyproject.toml -o requirements.lock
	@printf 'pip\nsetuptools\n' | $(BIN)/uv pip compile $(LOCK_FLAGS) - -o bootstrap.lock

clean:  ## removes .venv, caches and local data
	rm -rf $(VENV) .seqmesh .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info client/build client/*.egg-info
