# The project's verbs. Each is a thin script in scripts/; everything runs in .venv.
SIZE ?= medium
MINUTES ?= 10
SEED ?= 1
KILLS ?= 1000
TEST_ARGS ?= -n 4 --dist loadfile --no-loadscope-reorder
PYTEST ?= .venv/bin/pytest
QUICK := $(addprefix tests/,architecture playbook events engine tools corpus)

# images set it; every process would compile what it imports of this project, again and again
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup java browser demo dev check test-quick test test-slow fuzz chaos lint bench bench-peers soak docs docs-serve lock audit sbom services-up services-down kind clean

help: ## list the verbs
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 16

setup: ## make .venv with exactly what requirements.lock says
	@scripts/setup

java: ## check for Java 17 or newer, which Spark needs
	@scripts/java

browser: ## install Chromium for the tests of the pages if it is missing; without it they are skipped
	@scripts/browser

demo: setup java ## run the patient flow end to end; SIZE=small|medium|full
	.venv/bin/noetl-dagster demo --size $(SIZE)

dev: setup java ## Dagster's UI on http://127.0.0.1:3000 and the pages of executions on http://127.0.0.1:8700
	@scripts/dev

check: lint ## what a change must pass before a commit: ruff, mypy, the architecture
	.venv/bin/pytest tests/architecture

test-quick: setup ## the language, the log, the control plane and the tools, without the tests that take seconds
	$(PYTEST) $(TEST_ARGS) -m "not long and not spark and not slow and not chaos and not huge" $(QUICK)

test: setup java browser ## all tests, over the embedded services, and the 30 slowest of them; TEST_ARGS for pytest
	.venv/bin/pytest $(TEST_ARGS) --durations=30

test-slow: setup java browser ## the long tests, one after another: races, kills, large fan-outs and files; SLOW_ARGS for pytest
	.venv/bin/pytest -m slow $(SLOW_ARGS)

chaos: setup ## kill, stop and cut off the parts of running flows, and write docs/reports/chaos.md; SEED=, KILLS=
	.venv/bin/python -m tests.chaos --seed $(SEED) --kills $(KILLS) --report docs/reports/chaos.md $(CHAOS_ARGS)

fuzz: setup ## damaged playbooks, templates, results and messages, and drawn values; EXAMPLES=10000 of each
	FUZZ_EXAMPLES=$(or $(EXAMPLES),10000) .venv/bin/pytest -n 0 -q tests/malformed/test_fuzzing.py tests/values/test_crossings.py

lint: setup ## ruff, mypy, and the English of the documentation
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy
	.venv/bin/python scripts/prose.py

bench: setup java ## the benchmarks
	@scripts/bench

bench-peers: setup ## items a second of Dagster, Prefect, Temporal, DBOS and ours, into benchmarks/README.md
	@scripts/bench-peers

soak: MINUTES = 60
soak: setup ## an hour of load that stands for a day, into docs/reports/soak.md; MINUTES, SOAK_ARGS
	.venv/bin/python -m benchmarks.soak --minutes $(MINUTES) --report docs/reports/soak.md $(SOAK_ARGS)

docs: setup ## write the pages that are made from the code, and build the site into dist/site
	@scripts/docs
	@scripts/docs-site

docs-serve: setup ## show the site on http://127.0.0.1:8000 while you edit its pages
	@scripts/docs-site serve

lock: setup ## pin what pyproject.toml asks for, in requirements*.lock
	@scripts/lock

audit: setup ## look the locked packages up in the database of known vulnerabilities (osv.dev)
	@scripts/dependencies audit

sbom: setup ## write bills of materials of the locked packages, CycloneDX, into dist/
	@scripts/dependencies sbom

services-up: setup ## start PostgreSQL, NATS and the object store
	.venv/bin/noetl-dagster services up

services-down: setup ## stop them; their data stays
	.venv/bin/noetl-dagster services down

kind: ## try the chart on a real cluster of kind; PARTS="up install flow ...", CNI=cilium
	@scripts/kind $(PARTS)

clean: ## stop the services and delete all that is made, .venv too
	@scripts/clean
