# check: format, lint, types, floors · test: everything that is not slow · parity, fault: all of their folder · fuzz: schemathesis and mutated bodies at length · bench: docs/benchmarks.md · bench-stages: the path of one decode step (WRITE=1: docs/benchmarks.md)
VENV ?= .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/dev-installed
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q

.PHONY: check test parity fault fuzz bench bench-stages clean

$(STAMP): pyproject.toml
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[cpu,dev]'
	touch $@

check: $(STAMP)
	$(PYTHON) -m ruff format --check longcat_pd tests
	$(PYTHON) -m ruff check longcat_pd tests
	$(PYTHON) -m mypy
	$(PYTEST) tests/unit/test_floors.py tests/unit/test_sizes.py

test: $(STAMP)
	$(PYTEST) -m 'not slow' tests

parity: $(STAMP)
	$(PYTEST) tests/parity

fault: $(STAMP)
	$(PYTEST) tests/fault

fuzz: $(STAMP)
	$(PYTEST) -s -m slow tests/unit/test_malformed.py tests/integration/test_openapi.py

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m longcat_pd.bench --write docs/benchmarks.md

bench-stages: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m longcat_pd.bench.stages $(if $(WRITE),--write docs/benchmarks.md)

# Public clients and load generators, unmodified, each in an environment of its own (WRITE=1: docs/clients.md).
CLIENTS := .venv-clients
CLIENT_ENVIRONMENTS := $(patsubst tests/clients/requirements/%.txt,$(CLIENTS)/%/installed,$(wildcard tests/clients/requirements/*.txt))
NODE_CLIENTS := tests/clients/node/node_modules/installed

.PHONY: test-clients
test-clients: $(STAMP) $(CLIENT_ENVIRONMENTS) $(NODE_CLIENTS)
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.clients --environments $(CLIENTS) $(if $(WRITE),--write docs/clients.md)

$(CLIENTS)/%/installed: tests/clients/requirements/%.txt
	python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	touch $@

$(NODE_CLIENTS): tests/clients/node/package-lock.json
	npm ci --no-fund --no-audit --prefix $(<D)
	touch $@

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache build dist
