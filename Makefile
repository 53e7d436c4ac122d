# check: format, lint, types, floors · test: everything that is not slow, in two runs beside each other · test-slow: the rest · parity, fault, hosts: all of their folder · soak: ten thousand requests, ten minutes · fuzz: schemathesis, mutated bodies and control records at length · score-card: of the shipped checkpoints (WRITE=1: their page) · bench: docs/benchmarks.md · bench-stages: the path of one decode step (WRITE=1: docs/benchmarks.md)
VENV ?= .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/dev-installed
PYTEST := OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q

.PHONY: check test test-slow parity fault hosts soak fuzz bench bench-stages score-card clean

$(STAMP): pyproject.toml
	test -x $(PYTHON) || python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -e '.[cpu,otel,dev]'
	touch $@

check: $(STAMP)
	$(PYTHON) -m ruff format --check longcat_pd tests tools
	$(PYTHON) -m ruff check longcat_pd tests tools
	$(PYTHON) -m mypy
	$(PYTEST) tests/unit/test_floors.py tests/unit/test_sizes.py

test: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.halves -q -m 'not slow' -o faulthandler_timeout=300

test-slow: $(STAMP)
	$(PYTEST) -m slow tests

parity: $(STAMP)
	$(PYTEST) tests/parity

fault: $(STAMP)
	$(PYTEST) -s tests/fault

hosts: $(STAMP)
	$(PYTEST) tests/hosts

soak: $(STAMP)
	$(PYTEST) -s -m slow tests/soak

fuzz: $(STAMP)
	$(PYTEST) -s -m slow tests/unit/test_malformed.py tests/unit/test_fuzzed_control.py tests/integration/test_openapi.py

bench: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m longcat_pd.bench --write docs/benchmarks.md

bench-stages: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m longcat_pd.bench.stages $(if $(WRITE),--write docs/benchmarks.md)

# The scores of the shipped checkpoints, by one engine and by P(2,2) -> D(2).
score-card: $(STAMP)
	OMP_NUM_THREADS=1 $(PYTHON) -m tools.eval_tiny $(if $(WRITE),--write longcat_pd/tiny/trained/score_card.md)

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

# The status page in Chromium (Debian's, on the PATH, as is node), with axe, under 16 streams; pictures go to tests/page/pictures.
PAGE := tests/page/node_modules/installed

.PHONY: test-page
test-page: $(STAMP) $(PAGE)
	OMP_NUM_THREADS=1 $(PYTHON) -m tests.page

$(PAGE): tests/page/package-lock.json
	npm ci --no-fund --no-audit --prefix $(<D)
	touch $@

# The NPU table against the real torch_npu over link stand-ins: nothing runs on an NPU. x86-64, gcc and binutils; the wheels
# (75 MB) are a download of this target alone, into a folder of its own. Ten minutes on two cores.
NPU := .npu
NPU_RELEASES := 2.6.0.post5 2.13.0
NPU_ENV := TORCH_DEVICE_BACKEND_AUTOLOAD=0 LD_LIBRARY_PATH=$(NPU)/stand-ins PYTHONPATH=$(NPU)/site

.PHONY: npu-wheels test-npu test-npu-slow
npu-wheels: $(NPU)/wheels/complete

$(NPU)/wheels/complete: Makefile | $(STAMP)
	for release in $(NPU_RELEASES); do $(PYTHON) -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
	  --python-version 311 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 --dest $(@D) torch_npu==$$release || exit 1; done
	touch $@

$(NPU)/site/complete: tests/npu/offline/requirements.txt $(NPU)/wheels/complete
	rm -rf $(@D)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check --no-deps --find-links $(NPU)/wheels --target $(@D) -r $<
	touch $@

$(NPU)/stand-ins/complete: tests/npu/offline/stand_ins.py $(NPU)/site/complete
	rm -rf $(@D)
	$(PYTHON) -m tests.npu.offline.stand_ins $(NPU)/site $(@D)
	touch $@

test-npu: $(NPU)/stand-ins/complete
	$(NPU_ENV) $(PYTEST) -m 'not slow' tests/npu/offline tests/npu/test_schema_lines.py
	$(PYTEST) tests/npu --ignore tests/npu/offline

# The longest of them: graphs of a whole model's depth, five minutes.
test-npu-slow: $(NPU)/stand-ins/complete
	$(NPU_ENV) $(PYTEST) -m slow tests/npu/offline

# For who has a card. VENV: an environment with torch_npu, its torch, and the packages of pyproject.toml; nothing is installed here.
.PHONY: test-hardware
test-hardware:
	@echo "Needs an Ascend card, CANN (its set_env.sh sourced) and torch_npu in $(VENV); some tests two cards. Otherwise each test is skipped and says what was not shown."
	$(PYTEST) -rs -m npu tests/npu/test_hardware.py

clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache build dist
