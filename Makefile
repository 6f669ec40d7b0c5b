# Each target has one line of help after "##"; "make help" prints them.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PY := .venv/bin/python
MEMBERS := shared client lab testbed $(patsubst %/pyproject.toml,%,$(wildcard services/*/pyproject.toml))
# What is typed strictly beside the members: the helpers of the tests, the programs people copy.
TYPED := $(MEMBERS) $(wildcard tests/conftest.py tests/*/conftest.py tests/*/helpers*.py \
	benchmarks/*.py examples/*.py examples/*/*.py)
SETUP_INPUTS := requirements.txt requirements-boot.txt pyproject.toml $(MEMBERS:%=%/pyproject.toml) \
	scripts/setup.sh scripts/uv.sh scripts/find_python.sh
STAMP := .venv/.springtide
WORKERS ?= 2
# Printed per target where this make can do that, so that parallel checks do not mix their lines.
GROUPED := $(if $(filter output-sync,$(.FEATURES)),-Otarget)

# An environment that was made in another folder (a moved or copied clone) is made again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: setup
setup: $(STAMP) ## make .venv from the hashed requirements (PYTHON=path picks the interpreter)
	@:
$(STAMP): $(SETUP_INPUTS)
	@scripts/setup.sh .venv

.PHONY: demo
demo: setup ## run a real scientific array through every part, on this machine
	.venv/bin/springtide demo

SUITES = $(filter-out tests/e2e tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))

.PHONY: test
test: setup ## check, then every test; starts the real servers it needs (REQUIRE_REAL=1: none may miss)
	@$(MAKE) -k lint
	@# Not part of a test's time limit: a fresh machine installs the servers here. What cannot be
	@# had is no error yet: the tests that need it say so themselves.
	@$(PY) -m springtide_testbed install || true
	@# Real servers on a busy machine: what failed gets one more try, alone, and must pass it.
	$(PY) -m pytest -n $(WORKERS) $(SUITES) || \
		{ [ $$? -eq 1 ] && echo "once more, what failed:" && $(PY) -m pytest --last-failed $(SUITES); }
ifneq ($(wildcard tests/e2e/test_*.py),)
	@# These measure real time, so nothing runs beside them.
	$(PY) -m pytest tests/e2e
endif
	@$(MAKE) test-other-python

.PHONY: check
check: setup ## the fast gate: format, lint, types, import contracts, schemas, unit tests
	@$(MAKE) -k -j2 $(GROUPED) lint unit

.PHONY: lint unit format-check style types imports schemas-check
lint: format-check style imports schemas-check types
format-check: ; @.venv/bin/ruff format --check --quiet . || { .venv/bin/ruff format --check .; exit 1; }
style: ; @.venv/bin/ruff check --quiet .
imports: ; @.venv/bin/lint-imports > .venv/import-contracts.out 2>&1 || { cat .venv/import-contracts.out; exit 1; }
schemas-check: ; @$(PY) -m springtide_shared.messages.schemas --check
types: ; @.venv/bin/mypy $(TYPED)
unit: ; @$(PY) -m pytest -q -n $(WORKERS) tests/unit

.PHONY: test-other-python
test-other-python: ## the unit tests on another interpreter (3.13 or 3.12), in an environment of its own
	@scripts/test_other_python.sh

.PHONY: bench
bench: setup ## measure; writes out/bench/<name>.json (ONLY=name, DATA=dir)
	$(PY) -m benchmarks $(if $(ONLY),--only $(ONLY)) $(if $(DATA),--data $(DATA))

.PHONY: schemas
schemas: setup ## write the JSON Schemas of the messages anew
	$(PY) -m springtide_shared.messages.schemas --write

.PHONY: lock
lock: ## write the hashed requirements anew after a change of dependencies (UPGRADE=1: newest versions)
	@scripts/lock.sh $(if $(UPGRADE),--upgrade)

.PHONY: testbed-up
testbed-up: setup ## start RabbitMQ and PostgreSQL; prints what to export (PARTS=rabbitmq,postgresql)
	@$(PY) -m springtide_testbed up $(if $(PARTS),--parts $(PARTS))

.PHONY: testbed-down
testbed-down: setup ## end these servers and delete their data
	@$(PY) -m springtide_testbed down

.PHONY: clean
clean: ## remove environments, caches and results from the clone
	rm -rf .venv .venv-3.* out dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -exec rm -rf {} +
