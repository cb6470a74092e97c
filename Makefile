# Every target does all of its own set-up on a fresh machine; a second run skips what is there.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
BIN := .venv/bin
CACHE := .cache
STORES := $(CACHE)/bin/versitygw $(CACHE)/bin/fake-gcs-server $(CACHE)/azurite/installed
CLIENTS := $(CACHE)/bin/franz $(CACHE)/bin/kafkago $(CACHE)/kafkajs/installed
FAKE_GCS_VERSION := $(shell sed -n 's/^FAKE_GCS_VERSION = "\(.*\)"/\1/p' tests/servers/object_stores.py)
VERSITYGW_VERSION := $(shell sed -n 's/^VERSION = "\(.*\)"/\1/p' tests/servers/versitygw.py)

# Nothing of the caller's own environment reaches ours. Without byte code, every process that a test starts compiles anew.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-spark test matrix check fuzz drill bench lock jars frameworks clean

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: jars .venv/installed ## watch an unmodified consumer read what the broker has no more (ARGS=--keep leaves it running)
	$(BIN)/python -m bench.demo $(ARGS)

demo-spark: jars .venv/installed ## watch Spark offload a topic, read both tiers, export and scrub (ARGS=--mib=256 for more)
	$(BIN)/python -m bench.demo_spark $(ARGS)

# Tests of one server stay in one process (tests/conftest.py); the other has those that need none.
TEST_PROCESSES ?= 2

test: jars frameworks $(STORES) $(CLIENTS) check ## check, then every test, on real servers
	@$(BIN)/python -m tests.servers.kafka --archive >/dev/null
	$(BIN)/pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder $(ARGS)

# The newest patch of each that Maven Central has whole.
KAFKA_VERSIONS ?= 3.9.2 4.1.2 4.3.1

matrix: .venv/installed $(CACHE)/bin/franz ## every client against Kafka 3.9, 4.1 and 4.3 (KAFKA_VERSIONS="..." for others)
	@failed=; for version in $(KAFKA_VERSIONS); do \
	  echo "Kafka $$version"; \
	  KAFKA_VERSION=$$version $(BIN)/pytest -v tests/integration/test_client_matrix.py tests/integration/test_api_audit.py $(ARGS) || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed on Kafka:$$failed"; exit 1; }

check: .venv/installed ## style, types, layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: .venv/installed ## atheris on every target for a while (SECONDS_EACH=60, TARGETS="fetch_response ...")
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[fuzz]'
	for target in $(or $(TARGETS),$(notdir $(wildcard tests/fuzz/corpus/*))); do \
	  $(BIN)/python -W ignore -m tests.fuzz.run_atheris $$target -max_total_time=$(or $(SECONDS_EACH),60) || exit 1; done

drill: jars .venv/installed $(CACHE)/bin/versitygw ## kill and stop proxies, store and broker under load (SECONDS=600, SEED=7, PROXIES=5)
	$(BIN)/python -m tests.drill --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED)) $(if $(PROXIES),--proxies $(PROXIES))

bench: jars .venv/installed ## one table: through the proxy against direct (ARGS=--quick for a small run)
	$(BIN)/python -m bench.run $(ARGS)

lock: .venv/bin/python ## pin every dependency again, with hashes (ARGS=--upgrade for the newest)
	$(BIN)/python -m pip install -q pip-tools
	$(PIP_COMPILE) --build-deps-for wheel --output-file requirements.txt pyproject.toml
	$(PIP_COMPILE) --build-deps-for wheel --extra dev --constraint requirements.txt \
	  --output-file requirements-dev.txt pyproject.toml

# The lock names packages and hashes, never the machine or the index they came from.
PIP_COMPILE = env -u PIP_FIND_LINKS $(BIN)/pip-compile -q $(ARGS) --no-header --generate-hashes --strip-extras \
  --allow-unsafe --no-emit-index-url --no-emit-trusted-host --no-emit-find-links

jars: .venv/bin/python ## the jars of a real Kafka
	@$(BIN)/python -m tests.servers.kafka >/dev/null

frameworks: .venv/bin/python ## the jars of Kafka Streams, Connect and MirrorMaker
	@$(BIN)/python -m tests.servers.frameworks >/dev/null

clean: ## remove what was made here
	rm -rf .venv $(CACHE) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed: install it, or name it with PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python requirements-dev.txt pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-dev.txt
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

$(CACHE)/bin/versitygw:
	$(NEEDS_GO)
	GOBIN=$(CURDIR)/$(CACHE)/bin go install github.com/versity/versitygw/cmd/versitygw@$(VERSITYGW_VERSION)

$(CACHE)/bin/fake-gcs-server:
	$(NEEDS_GO)
	GOBIN=$(CURDIR)/$(CACHE)/bin go install github.com/fsouza/fake-gcs-server@$(FAKE_GCS_VERSION)

$(CACHE)/azurite/installed: tests/servers/azurite/package.json tests/servers/azurite/package-lock.json
	$(NPM_CI)

$(CACHE)/kafkajs/installed: tests/clients/kafkajs/package.json tests/clients/kafkajs/package-lock.json
	$(NPM_CI)

$(CACHE)/bin/franz: $(wildcard tests/clients/franz/*)
	$(NEEDS_GO)
	cd tests/clients/franz && go build -trimpath -o $(CURDIR)/$@ .
	@touch $@

$(CACHE)/bin/kafkago: $(wildcard tests/clients/kafkago/*)
	$(NEEDS_GO)
	cd tests/clients/kafkago && go build -trimpath -o $(CURDIR)/$@ .
	@touch $@

define NPM_CI
@command -v npm >/dev/null || { echo "npm is missing: install it, it fetches a server and a client of the tests"; exit 1; }
mkdir -p $(@D) && cp $^ $(@D)/ && cd $(@D) && npm ci --ignore-scripts --no-audit --no-fund
@touch $@
endef

NEEDS_GO = @command -v go >/dev/null || \
  { echo "Go is missing: install it (golang-go), it builds the S3 server and two clients of the tests"; exit 1; }
