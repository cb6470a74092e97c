# Every target sets up everything that it needs on a fresh machine. Later runs skip the parts that exist.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
BIN := .venv/bin
CACHE := .cache
# Servers and clients of `make test`, and the ones that only `make test-all` needs.
TEST_TOOLS := $(CACHE)/bin/versitygw $(CACHE)/bin/franz $(CACHE)/bin/kafkago
MORE_TEST_TOOLS := $(CACHE)/bin/sarama $(CACHE)/bin/fake-gcs-server $(CACHE)/azurite/installed $(CACHE)/kafkajs/installed \
  $(CACHE)/bin/promtool $(CACHE)/bin/helm
FAKE_GCS_VERSION := $(shell sed -n 's/^FAKE_GCS_VERSION = "\(.*\)"/\1/p' tests/support/servers/object_stores.py)
VERSITYGW_VERSION := $(shell sed -n 's/^VERSION = "\(.*\)"/\1/p' tests/support/servers/versitygw.py)

# The caller's Python environment must not affect these targets. PYTHONDONTWRITEBYTECODE would make every process that a
# test starts compile its modules again.
unexport VIRTUAL_ENV PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE

.PHONY: help demo demo-spark test test-all soak matrix simulate mutants check fuzz drill bench docs alerts lock release jars frameworks clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: jars .venv/demo ## show an unmodified consumer that reads records the broker no longer has (ARGS=--keep leaves it running)
	$(BIN)/python -m bench.demo $(ARGS)

demo-spark: jars .venv/installed ## show Spark that offloads a topic, reads both tiers, exports and scrubs (ARGS=--mib=256 for more)
	$(BIN)/python -m bench.demo_spark $(ARGS)

# The tests that share a server run in one process (tests/conftest.py). The other process runs tests without servers.
TEST_PROCESSES ?= 2

# The death of a test process ends the run. If xdist replaces the process, groups of tests never run, and the run hangs.
PYTEST := $(BIN)/pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder --max-worker-restart 0

test: jars $(TEST_TOOLS) check ## run check and the tests of every change, on a real Kafka and a real S3
	@$(BIN)/python -m tests.support.servers.kafka --archive >/dev/null
	$(PYTEST) -m "not full" $(ARGS)

test-all: programs jars frameworks .venv/docs $(TEST_TOOLS) $(MORE_TEST_TOOLS) check ## run check and all tests: three brokers, elections, HDFS, Spark, Streams, ...
	@$(BIN)/python -m tests.support.servers.kafka --archive >/dev/null
	$(PYTEST) $(ARGS)

# Programs that no target installs. haproxy is often in a folder that is not in the path of a user.
.PHONY: programs
programs:
	@for name in chromium haproxy; do \
	  PATH="$$PATH:/usr/sbin" command -v $$name >/dev/null || { echo "$$name is missing: install it (apt-get install $$name)"; exit 1; }; \
	done

soak: jars $(TEST_TOOLS) $(CACHE)/bin/sarama $(CACHE)/kafkajs/installed drill fuzz ## run the drill, the fuzzers, random examples and workloads, long outages by the clock, and planted bugs
	TIDEGATE_HYPOTHESIS=random $(BIN)/pytest tests/unit
	TIDEGATE_SEEDS=20 $(BIN)/pytest tests/system/test_differential.py
	TIDEGATE_CUT_OFF_S=300 $(BIN)/pytest tests/system/test_cut_off_follower.py
	TIDEGATE_STORE_STOPPED_S=900 $(BIN)/pytest tests/system/test_foreign_clients.py -k stopped_store
	$(BIN)/python -m tests.support.simulation.planted_search

simulate: .venv/installed ## run a simulated cluster with faults (SEEDS=1000, FIRST=0, FEW_KINDS=1, DOUBTS=1; SEED=7 for one)
	$(BIN)/python -m tests.support.simulation --seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0) $(if $(SEED),--seed $(SEED)) \
		$(if $(FEW_KINDS),--few-kinds) $(if $(DOUBTS),--doubts)

# The newest patch of each minor version whose artifacts are all on Maven Central.
KAFKA_VERSIONS ?= 3.9.2 4.1.2 4.3.1

matrix: .venv/installed $(CACHE)/bin/franz ## test every client against Kafka 3.9, 4.1 and 4.3 (KAFKA_VERSIONS="..." for others)
	@failed=; for version in $(KAFKA_VERSIONS); do \
	  echo "Kafka $$version"; \
	  KAFKA_VERSION=$$version $(BIN)/pytest -v tests/integration/test_client_matrix.py tests/system/test_api_audit.py $(ARGS) || failed="$$failed $$version"; \
	done; test -z "$$failed" || { echo "failed on Kafka:$$failed"; exit 1; }

# COMPARE=file fails if a kill rate is lower than in that report, for example tests/support/mutants/rates.json. SAVE=file
# writes a report. PLANTED=200 searches the planted bugs of the simulation too, each in 200 seeds.
mutants: .venv/installed ## measure how many small defects the unit tests find (FOLDERS="tiers/tasks", SEED=7, MAX=150, SECONDS=1800)
	$(BIN)/python -m tests.support.mutants $(or $(FOLDERS),tiers/tasks tiers/metadata tiers/model) \
		--seed $(or $(SEED),7) --max $(or $(MAX),150) --seconds $(or $(SECONDS),1800) $(if $(PLANTED),--planted $(PLANTED)) \
		$(if $(COMPARE),--compare $(COMPARE)) $(if $(SAVE),--save $(SAVE)) $(ARGS)

check: .venv/installed ## check style, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fuzz: .venv/installed ## fuzz every target with atheris (SECONDS_EACH=60, TARGETS="fetch_response ...")
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[fuzz]'
	for target in $(or $(TARGETS),$(notdir $(wildcard tests/fuzz/corpus/*))); do \
	  $(BIN)/python -W ignore -m tests.fuzz.run_atheris $$target -max_total_time=$(or $(SECONDS_EACH),60) || exit 1; done

drill: jars .venv/installed $(CACHE)/bin/versitygw ## kill and stop proxies, store and broker under load (SECONDS=600, SEED=7, PROXIES=5)
	$(BIN)/python -m tests.drill --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED)) $(if $(PROXIES),--proxies $(PROXIES))

bench: jars .venv/installed $(CACHE)/bin/versitygw ## measure Tidegate beside its peers and write a report, in 10 minutes (ARGS=--quick, --full)
	$(BIN)/python -m bench $(ARGS)

docs: .venv/docs ## build the documentation as web pages, and fail on a broken link
	$(SPHINX)
	@echo "The pages: build/docs/docs/index.html"

# The source folder is the root of the repository, because pages link to files outside of docs/.
SPHINX = $(BIN)/sphinx-build -q -W --keep-going -c docs -b html . build/docs

ALERTS ?= build/tidegate-alerts.yaml

alerts: ## write the alert rules with links to your copy of docs/runbook (RUNBOOKS=https://git.example.org/tidegate/docs/runbook)
	@test -n "$(RUNBOOKS)" || { echo "say RUNBOOKS=URL, the address of your copy of docs/runbook" >&2; exit 1; }
	@mkdir -p $(dir $(ALERTS))
	@sed 's|runbook_url: docs/runbook|runbook_url: $(RUNBOOKS:/=)|' deploy/prometheus/tidegate-alerts.yaml > $(ALERTS)
	@echo "The rules: $(ALERTS)"

lock: .venv/bin/python ## pin every dependency again, with hashes (ARGS=--upgrade for the newest)
	$(BIN)/python -m pip install -q pip-tools
	$(PIP_COMPILE) --build-deps-for wheel --output-file requirements.txt pyproject.toml
	$(PIP_COMPILE) --build-deps-for wheel --extra dev --constraint requirements.txt \
	  --output-file requirements-dev.txt pyproject.toml
	$(PIP_COMPILE) --build-deps-for wheel --extra demo --constraint requirements-dev.txt \
	  --output-file requirements-demo.txt pyproject.toml
	$(PIP_COMPILE) --build-deps-for wheel --extra docs --constraint requirements-dev.txt \
	  --output-file requirements-docs.txt pyproject.toml

# The lock files name packages and hashes, but not the machine that wrote them or the package index.
PIP_COMPILE = env -u PIP_FIND_LINKS $(BIN)/pip-compile -q $(ARGS) --no-header --generate-hashes --strip-extras \
  --allow-unsafe --no-emit-index-url --no-emit-trusted-host --no-emit-find-links

release: .venv/installed $(CACHE)/bin/helm ## build wheel, sdist, chart, SBOM and checksums from the git tag at HEAD
	@$(BIN)/python deploy/release.py $(CACHE)/bin/helm

jars: .venv/bin/python ## download the jars of a real Kafka
	@$(BIN)/python -m tests.support.servers.kafka >/dev/null

frameworks: .venv/bin/python ## download the jars of Kafka Streams, Connect and MirrorMaker
	@$(BIN)/python -m tests.support.servers.frameworks >/dev/null

clean: ## remove everything that make created
	rm -rf .venv $(CACHE) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is missing: install it, or give its path with PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv .venv

# The demo needs the runtime and one client. A folder that has all dependencies has these too.
.venv/demo: .venv/bin/python requirements-demo.txt pyproject.toml
	test -e .venv/installed || $(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-demo.txt
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.venv/installed: .venv/bin/python requirements-dev.txt pyproject.toml
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-dev.txt
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

.venv/docs: .venv/installed requirements-docs.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements-docs.txt
	@touch $@

$(CACHE)/bin/versitygw:
	$(NEEDS_GO)
	GOBIN=$(CURDIR)/$(CACHE)/bin go install github.com/versity/versitygw/cmd/versitygw@$(VERSITYGW_VERSION)

$(CACHE)/bin/fake-gcs-server:
	$(NEEDS_GO)
	GOBIN=$(CURDIR)/$(CACHE)/bin go install github.com/fsouza/fake-gcs-server@$(FAKE_GCS_VERSION)

$(CACHE)/azurite/installed: tests/support/servers/azurite/package.json tests/support/servers/azurite/package-lock.json
	$(NPM_CI)

$(CACHE)/kafkajs/installed: tests/support/clients/kafkajs/package.json tests/support/clients/kafkajs/package-lock.json
	$(NPM_CI)

$(CACHE)/bin/franz: $(wildcard tests/support/clients/franz/*)
	$(NEEDS_GO)
	cd tests/support/clients/franz && go build -trimpath -o $(CURDIR)/$@ .
	@touch $@

$(CACHE)/bin/kafkago: $(wildcard tests/support/clients/kafkago/*)
	$(NEEDS_GO)
	cd tests/support/clients/kafkago && go build -trimpath -o $(CURDIR)/$@ .
	@touch $@

$(CACHE)/bin/sarama: $(wildcard tests/support/clients/sarama/*)
	$(NEEDS_GO)
	cd tests/support/clients/sarama && go build -trimpath -o $(CURDIR)/$@ .
	@touch $@

# Released versions of these two refuse `go install`, since their go.mod has replacements. Without the tag, promtool also has
# the clients of twenty clouds.
$(CACHE)/bin/promtool: $(wildcard tests/support/tools/promtool/*)
	$(NEEDS_GO)
	cd tests/support/tools/promtool && go build -trimpath -tags remove_all_sd -o $(CURDIR)/$@ github.com/prometheus/prometheus/cmd/promtool
	@touch $@

$(CACHE)/bin/helm: $(wildcard tests/support/tools/helm/*)
	$(NEEDS_GO)
	cd tests/support/tools/helm && go build -trimpath -o $(CURDIR)/$@ helm.sh/helm/v4/cmd/helm
	@touch $@

define NPM_CI
@command -v npm >/dev/null || { echo "npm is missing: install it. The tests use it to fetch a server and a client."; exit 1; }
mkdir -p $(@D) && cp $^ $(@D)/ && cd $(@D) && npm ci --ignore-scripts --no-audit --no-fund
@touch $@
endef

NEEDS_GO = @command -v go >/dev/null || \
  { echo "Go is missing: install it (golang-go). The tests use it to build object stores and clients."; exit 1; }
