# Everything a contributor runs. Targets that need packages create .venv on first use; a stamp file per set of
# packages makes the second run do nothing.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(shell command -v $(name))))
PIP := $(BIN)/python -m pip --disable-pip-version-check install -c constraints.txt
MODEL ?= smollm2-135m-instruct
# Extra flags of `tandem up`, e.g. `make serve UP="--decode 2 --dtype float32"`.
UP ?=
# Extra flags of benchmarks/engine.py, e.g. `make bench-engine BENCH="--quick"`, and of engine_step.py; where the
# benchmarks' results go, e.g. `RESULTS=benchmarks/results/cpu-zen4-2core`.
BENCH ?=
STEP ?=
RESULTS ?= build/benchmarks
# Extra flags of benchmarks/slo.py, e.g. `make bench-slo SLO="--seconds 120 --dataset FILE.jsonl"`.
SLO ?=
# Extra flags of benchmarks/gpu.
GPU ?=
# Extra flags of deploy/observability/observe.py, e.g. `make observe OBSERVE="--prometheus-port 9099"`.
OBSERVE ?=
# Extra flags of pytest, e.g. `make test TEST="tests/cli -x"`.
TEST ?=

# Checks of mypy that benchmarks need not pass: they concern missing or imprecise annotations.
LENIENT := misc no-untyped-call no-any-return untyped-decorator var-annotated import-not-found import-untyped union-attr index assignment

.PHONY: help venv serve test test-all clients bench-engine bench-slo bench-kernels bench-gpu observe observability lint format types imports proto proto-check buf check clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/.runtime: pyproject.toml constraints.txt hatch_build.py build_native.py $(wildcard kernels/csrc/* kernels/csrc/*/* drafting/csrc/*)
	@"$(PYTHON)" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Tandem needs Python 3.11 or newer, this is %s; choose one with make PYTHON=..." % sys.version.split()[0])'
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@echo "Installing the runtime packages (once; minutes, mostly torch)"
	$(PIP) -e .
	@touch $@

# torch's CUDA build comes with the triton it needs; beside a CPU build the kernels' tests need one too.
$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the development packages (once)"
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.6.0
	$(PIP) -e '.[dev]'
	@touch $@

venv: $(VENV)/.dev ## Create .venv with everything to run and develop

serve: $(VENV)/.runtime ## Download a model and serve it (MODEL= another one; UP= adds flags)
	@$(BIN)/tandem model pull $(MODEL)
	@exec $(BIN)/tandem up --model $(MODEL) $(UP)

# Tests of one process run on one worker per core and one more, because many tests wait. Each worker is pinned to a core
# (tests/conftest.py), and runs whole files. Files start in the order of their folders, which begins the longest
# (engine, kernels) before many short ones: xdist's own order, by number of tests, begins those with few long tests
# last, and leaves cores idle. Tests that start the whole system have the machine to themselves afterwards. What fails
# is run once more without company, and must pass then: some tests wait for a heartbeat or a deadline of real processes,
# which another load can delay. Exit code 5 of pytest: TEST selects none of these; 1: tests failed.
PARALLEL := -n $(shell expr $$(nproc) + 1) --dist loadfile --no-loadscope-reorder
AGAIN := -x --last-failed --last-failed-no-failures none
define pytest
$(call attempts,$(PARALLEL),"not e2e $(1)")
$(call attempts,,"e2e $(1)")
endef
define attempts
run=($(BIN)/python -P -m pytest -m $(2) $(TEST)); \
"$${run[@]}" $(1) || case $$? in 5) ;; 1) echo "==> what failed, once more"; "$${run[@]}" $(AGAIN) ;; *) exit 1 ;; esac
endef

test: $(VENV)/.dev ## Run the tests that need neither a GPU nor patience
	$(call pytest,and not wide and not gpu)

test-all: $(VENV)/.dev ## Run all tests, the slow sweeps too
	$(call pytest,)

clients: $(VENV)/.dev ## Run all clients of docs/clients.md, and write its table (first: gigabytes of packages)
	$(BIN)/python -P -m pytest $(TEST) tests/clients -k works
	$(BIN)/python tests/helpers/client_page.py

bench-engine: $(VENV)/.dev ## TTFT, TPOT and step times beside other systems (BENCH="--quick": minutes)
	$(BIN)/python benchmarks/engine_step.py --out $(RESULTS)/engine-step.md $(STEP)
	$(BIN)/python benchmarks/engine.py --out $(RESULTS)/engine.md $(BENCH)

bench-slo: $(VENV)/.dev ## Overload, predictions and fairness, compared with FCFS, FCFS limit and EDF limit
	@mkdir -p $(RESULTS)
	$(BIN)/python benchmarks/slo.py --out $(RESULTS)/slo.md --records $(RESULTS)/slo.jsonl --plot $(RESULTS)/slo.png $(SLO)

bench-kernels: $(VENV)/.dev ## The CPU kernels beside torch's
	$(BIN)/python benchmarks/kernels_cpu.py --out $(RESULTS)/kernels-cpu.md

bench-gpu: $(VENV)/.dev ## Parts of nine minutes on one GPU (GPU="--part B"); without a GPU a dry run
	$(BIN)/python benchmarks/gpu --out $(RESULTS)/gpu $(GPU)

observe: $(VENV)/.runtime ## Prometheus and Alertmanager beside a running `make serve`
	@exec $(BIN)/python deploy/observability/observe.py $(OBSERVE)

observability: $(VENV)/.dev ## Regenerate dashboards, alert rules and the tables of docs/observability.md
	$(BIN)/python deploy/observability/generate.py

lint: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev ## Apply ruff's fixes and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Benchmarks need no annotations, but must not call what is no longer there.
types: $(VENV)/.dev ## mypy, strict; benchmarks without strict
	$(BIN)/mypy
	MYPYPATH=benchmarks:tests/helpers $(BIN)/mypy --no-warn-unused-ignores --follow-imports silent $(LENIENT:%=--disable-error-code %) benchmarks/*.py

imports: $(VENV)/.dev ## Who may import whom
	$(BIN)/lint-imports

proto: $(VENV)/.dev ## Regenerate the stubs from the .proto files
	PYTHON=$(BIN)/python proto/generate.sh

proto-check: $(VENV)/.dev ## Are the committed stubs those of the .proto files?
	$(BIN)/python -P -m pytest -q tests/repo -k stubs

# Breaking changes are judged against the last release, or the commit before this one while there is none.
buf: $(VENV)/.dev ## Lint the .proto files, and look for breaking changes
	$(BIN)/buf lint proto
	@base=$$(git describe --tags --abbrev=0 2>/dev/null || git rev-parse --quiet --verify HEAD~1 || true); \
	if [ -z "$$base" ] || ! git cat-file -e "$$base:proto/buf.yaml" 2>/dev/null; then \
	  echo "buf breaking: SKIPPED, no earlier commit with proto/ to compare with"; \
	else \
	  old=$$(mktemp -d); trap 'rm -rf "$$old"' EXIT; \
	  git archive "$$base" proto | tar -x -C "$$old"; \
	  $(BIN)/buf breaking proto --against "$$old/proto"; \
	  echo "buf breaking: none since $$base"; \
	fi

check: lint types imports proto-check buf ## Everything but the tests

clean: ## Remove caches and the virtual environment
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
