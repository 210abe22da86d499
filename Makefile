# The two commands: `make demo` and `make test`. Both set up .venv by themselves. `make help` lists the rest.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT ?= demo-out
STACK_OUT ?= stack-out
SEED ?= 0
PYTEST_ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo demo-decisions demo-seeds stack test test-full lint bench fuzz kills controls soak vllm-env lock clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1\t\2/' | while IFS="$$(printf '\t')" read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if (3, 11) <= v[:2] else f"spanloop needs Python 3.11 or newer, {sys.executable} is {v[0]}.{v[1]}: install python3.11 or run make PYTHON=/path/to/python3.11")'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "this Python has no venv module: install it (Debian/Ubuntu: apt-get install python3-venv)"; exit 1; }
	@echo "==> setting up $(VENV) (once; about three minutes and 3 GB)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> installing torch (CPU) and the rest, pinned by constraints.txt"
	@$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt torch==2.13.0 || { echo "pip could not install torch 2.13.0: is the package index reachable? (a CPU-only index can be given with PIP_EXTRA_INDEX_URL)"; exit 1; }
	@$(BIN)/python -m pip install --quiet --progress-bar off -c constraints.txt -e '.[stack,dev]' || { echo "pip could not install the dependencies: see its message above; 'make clean' starts over"; exit 1; }
	@touch $(READY)

demo: $(READY) ## Run the whole loop (about 6 minutes) and write $(OUT)/report.html; SEED=n
	@$(BIN)/spanloop demo --seed $(SEED) --out $(OUT)

demo-decisions: $(READY) ## The same for a team whose LLM is closed: it asks /v1/decide (about 4 minutes)
	@$(BIN)/spanloop demo --decisions --seed $(SEED) --out $(OUT)

demo-seeds: $(READY) ## The demo on five seeds; results in benchmarks/results/demo_seeds.json
	@$(BIN)/python benchmarks/demo_seeds.py --seeds 5

stack: $(READY) ## Kafka, two Faust workers, MLflow server, vLLM and agents as one system, each killed once (under 15 minutes; STACK_OUT)
	@test -n "$$SPANLOOP_VLLM_PYTHON" || test -x .venv-vllm/bin/python || $(MAKE) --no-print-directory vllm-env
	@PYTHONPATH=examples $(BIN)/python -m stack.system --out $(STACK_OUT)

test: $(READY) ## Lint and test everything that fits in minutes (what CI runs)
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest -m "not full" $(PYTEST_ARGS)

test-full: $(READY) ## make test and the long checks: kills, controls, a stranger's install
	@$(MAKE) --no-print-directory lint
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(READY) ## Style, types and the rules between rooms
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports

bench: $(READY) ## Run benchmarks/*.py and rewrite benchmarks/results/*.json
	@set -e; for b in benchmarks/*.py; do case $$b in benchmarks/_*|*demo_seeds*|*controls*|*fuzz*) continue;; esac; echo "==> $$b"; $(BIN)/python $$b; done

fuzz: $(READY) ## A million corrupted OTLP requests: no crash, no hang, no valid neighbour lost (about 15 minutes; benchmarks/results/fuzz.json)
	@$(BIN)/python benchmarks/fuzz.py

kills: $(READY) ## kill -9 of the learner at a hundred random points: same weights, each sample once (benchmarks/results/learner_kills.json)
	@SPANLOOP_KILLS=100 SPANLOOP_RESULTS=benchmarks/results/learner_kills.json $(BIN)/python -m pytest -q tests/full/test_learner_kills.py

controls: $(READY) ## Shuffled credit and withheld feedback: nothing may be learned (about 15 minutes)
	@$(BIN)/python benchmarks/controls.py

vllm-env: ## Make .venv-vllm, the environment of the vLLM server (about three minutes and 3.5 GB; SPANLOOP_VLLM_PYTHON takes one that exists)
	@$(PYTHON) examples/stack/vllm_env.py .venv-vllm

lock: $(READY) ## Rewrite constraints.txt from this .venv
	@$(BIN)/python -m pip freeze --exclude-editable | grep -vE '^(spanloop|-e |#)' | sed 's/ @ .*//' > constraints.txt

clean: ## Remove .venv and demo output
	rm -rf $(VENV) $(OUT)
